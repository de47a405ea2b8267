// How the tests run: TypeScript sources directly, in child processes, with guarded native memory.
import { defineConfig } from 'vitest/config'

export default defineConfig({
  // Node 20 has no `using`.
  oxc: { target: 'es2022' },
  test: {
    include: ['test/**/*.test.ts'],
    env: { COAT_GUARD: '1' },
    pool: 'forks',
    testTimeout: 240_000,
    hookTimeout: 240_000,
    reporters: ['default', './scripts/count-reporter.mjs'],
  },
})
