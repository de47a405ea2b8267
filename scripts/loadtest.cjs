// Loads the addon and fails if it cannot be used: run in a process of its own, since a wrong binary may crash it.
// An argument names the file; without one, node-gyp-build finds it as the library does.
const path = require('node:path')

const file = require.main === module && process.argv[2]
const addon = file ? require(path.resolve(file)) : require('node-gyp-build')(path.dirname(__dirname))
if (typeof addon.describe !== 'function') throw new Error('the addon loads but has no describe()')
