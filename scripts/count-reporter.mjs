// A vitest reporter whose one plain line, `N passed, N failed, N skipped`, is the last that a run prints.
export default class CountReporter {
  onTestRunEnd(modules, unhandledErrors) {
    const count = { passed: 0, failed: unhandledErrors.length, skipped: 0, pending: 0 }
    for (const module of modules) {
      const before = count.failed
      for (const test of module.children.allTests()) count[test.result().state]++
      // A file or a hook that throws has no failed test of its own.
      if (module.state() === 'failed' && count.failed === before) count.failed++
    }
    // Other reporters may still print, so the line waits for the end of the process.
    process.once('exit', () => {
      const skipped = count.skipped + count.pending
      process.stdout.write(`${count.passed} passed, ${count.failed} failed, ${skipped} skipped\n`)
    })
  }
}
