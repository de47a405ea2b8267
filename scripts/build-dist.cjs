// Builds dist/ from lib/, bench/, train/ and examples/: tsc, then one bundle for the charts, whose packages are devDependencies.
const { spawnSync } = require('node:child_process')
const fs = require('node:fs')
const path = require('node:path')
const { hashOf } = require('./build-native.cjs')

const root = path.dirname(__dirname)
const dist = path.join(root, 'dist')
const stampFile = path.join(dist, '.stamp')

function inputs() {
  const sources = ['lib', 'bench', 'train', 'examples']
    .filter((dir) => fs.existsSync(path.join(root, dir)))
    .flatMap((dir) => fs.readdirSync(path.join(root, dir), { recursive: true }).map((name) => `${dir}/${name}`))
    .filter((name) => name.endsWith('.ts'))
  return ['package-lock.json', 'tsconfig.json', 'tsconfig.build.json', 'scripts/build-dist.cjs', ...sources.sort()]
}

/** Whether dist/ was built from these sources. */
const fresh = () => fs.existsSync(stampFile) && fs.readFileSync(stampFile, 'utf8') === hashOf(inputs())

async function bundleCharts() {
  const source = path.join(root, 'lib/charts.ts')
  if (!fs.existsSync(source)) return
  await require('esbuild').build({
    entryPoints: [source],
    outfile: path.join(dist, 'lib/charts.js'),
    bundle: true,
    platform: 'node',
    format: 'esm',
    target: 'node20',
    minify: true,
    legalComments: 'eof',
    logLevel: 'warning',
    external: ['canvas'],
    // A package inside is CommonJS and asks for canvas, which may be absent.
    banner: { js: "import { createRequire } from 'node:module';const require=createRequire(import.meta.url);" },
    allowOverwrite: true,
  })
  fs.rmSync(path.join(dist, 'lib/charts.js.map'), { force: true })
}

async function main() {
  const made = hashOf(inputs()) // before the build: a file saved meanwhile must count as changed
  fs.rmSync(dist, { recursive: true, force: true })
  const tsc = require.resolve('typescript/bin/tsc')
  const { status } = spawnSync(process.execPath, [tsc, '-p', 'tsconfig.build.json'], { cwd: root, stdio: 'inherit' })
  if (status !== 0) throw new Error('tsc found errors; the lines above say where')
  await bundleCharts()
  for (const cli of ['bench/cli.js', 'train/cli.js']) fs.chmodSync(path.join(dist, cli), 0o755)
  fs.writeFileSync(stampFile, made)
}

module.exports = { fresh }

if (require.main === module) {
  main().catch((error) => {
    console.error(`build: ${error.message}`)
    process.exitCode = 1
  })
}
