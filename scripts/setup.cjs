// What start, test and check run first: packages, native addon and dist/, each only where it is missing or out of date.
// Uses nothing but Node, since it also runs in a bare clone.
const { spawnSync } = require('node:child_process')
const fs = require('node:fs')
const path = require('node:path')

const root = path.dirname(__dirname)
const log = path.join(root, '.cmake-build/setup.log')

function fail(message) {
  console.error(`setup: ${message}`)
  process.exit(1)
}

function run(what, command, args) {
  console.log(`setup: ${what}`)
  fs.mkdirSync(path.dirname(log), { recursive: true })
  const out = fs.openSync(log, 'w')
  const { INIT_CWD, ...env } = process.env
  const { status, signal, error } = spawnSync(command, args, { cwd: root, env, stdio: ['ignore', out, out] })
  fs.closeSync(out)
  if (status === 0) return
  process.stderr.write(fs.readFileSync(log))
  fail(`failed: ${what} (${error?.message ?? signal ?? `exit ${status}`})`)
}

/** Whether node_modules holds what package-lock.json asks for; npm leaves its own account there when it is done. */
function packagesFresh() {
  const installed = path.join(root, 'node_modules/.package-lock.json')
  if (!fs.existsSync(installed)) return false
  const have = JSON.parse(fs.readFileSync(installed, 'utf8')).packages
  const want = JSON.parse(fs.readFileSync(path.join(root, 'package-lock.json'), 'utf8')).packages
  return Object.entries(want).every(
    ([name, { integrity, optional }]) =>
      name === '' || have[name]?.integrity === integrity || (optional && !have[name]),
  )
}

const [major, minor] = process.versions.node.split('.').map(Number)
if (major < 20 || (major === 20 && minor < 19))
  fail(`Node.js 20.19 or newer is needed, this is ${process.versions.node}`)

if (!packagesFresh()) {
  // Scripts of packages are not needed, and the addon is built below, where a failure can be read.
  const args = ['ci', '--ignore-scripts', '--no-audit', '--no-fund']
  const npm = process.env.npm_execpath
  if (npm?.endsWith('.js')) run('installing packages (npm ci)', process.execPath, [npm, ...args])
  else run('installing packages (npm ci)', 'npm', args)
}

const script = (name) => path.join(__dirname, name)
try {
  if (!require('./build-native.cjs').fresh()) {
    run('building the native addon', process.execPath, [script('build-native.cjs')])
  }
} catch (error) {
  fail(error.message)
}
if (!require('./build-dist.cjs').fresh()) run('building dist/', process.execPath, [script('build-dist.cjs')])
