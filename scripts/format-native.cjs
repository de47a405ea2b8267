// Formats the C++ and CUDA sources with clang-format; --check only lists the files that differ, and fails if there are any.
// ops.def is left alone: it is a table, aligned by hand.
const { execFileSync } = require('node:child_process')
const fs = require('node:fs')
const path = require('node:path')

const root = path.dirname(__dirname)
const check = process.argv.includes('--check')
const clangFormat = path.join(path.dirname(require.resolve('clang-format/package.json')), 'bin/linux_x64/clang-format')

const files = fs
  .readdirSync(path.join(root, 'csrc'), { recursive: true })
  .filter((name) => /\.(cc|h|cu|cuh)$/.test(name))
  .map((name) => `csrc/${name}`)
  .sort()

const differing = files.filter((file) => {
  const before = fs.readFileSync(path.join(root, file))
  const after = execFileSync(clangFormat, ['--style=file', file], { cwd: root, maxBuffer: 2 ** 26 })
  if (before.equals(after)) return false
  if (!check) fs.writeFileSync(path.join(root, file), after)
  return true
})

for (const file of differing) console.log(check ? `${file} is not formatted (npm run format)` : `formatted ${file}`)
if (check && differing.length > 0) process.exitCode = 1
