// Writes lib/native.gen.ts, the TypeScript face of csrc/ops.def, as the addon describes it; builds the addon first if need be.
const { spawnSync } = require('node:child_process')
const fs = require('node:fs')
const path = require('node:path')

const root = path.dirname(__dirname)
if (!require('./build-native.cjs').fresh()) {
  const { status } = spawnSync(process.execPath, [path.join(__dirname, 'build-native.cjs')], {
    cwd: root,
    stdio: 'inherit',
  })
  if (status !== 0) process.exit(1)
}
const file = path.join(root, 'lib/native.gen.ts')
const text = require('node-gyp-build')(root).describe()
fs.mkdirSync(path.dirname(file), { recursive: true })
fs.writeFileSync(file, text)
console.log(`wrote lib/native.gen.ts, ${text.split('\n').length - 1} lines`)
