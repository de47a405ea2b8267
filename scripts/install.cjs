// The install script: a binary that loads is kept, else the addon is built.
// As a dependency it ends well even when the build fails, since npm would undo the whole install and with it npx coat-build.
const { spawnSync } = require('node:child_process')
const path = require('node:path')

const root = path.dirname(__dirname)
const node = (script, stdio) =>
  spawnSync(process.execPath, [path.join(__dirname, script)], { cwd: root, stdio }).status === 0

const from = path.relative(root, process.env.INIT_CWD || process.cwd())
const isClone = from === '' || !(from.startsWith('..') || path.isAbsolute(from))

// In a clone the sources may be newer than a binary that loads.
const done = (!isClone && node('loadtest.cjs', 'ignore')) || node('build-native.cjs', 'inherit')
if (!done) {
  if (isClone) process.exit(1)
  console.error('coat-fp8 is installed without its native addon; once the above is mended, run: npx coat-build')
}
