// Schedules: warm-up, peak and end to the step, for any number of steps.
import { describe, expect, it } from 'vitest'
import { constant, cosine, linear, type Schedule, wsd } from '../lib/index.ts'

const floors = { cosine: 0.1, linear: 0, wsd: 0 }
const falling = { cosine, linear, wsd } as const

function rates(schedule: Schedule, steps: number): number[] {
  return Array.from({ length: steps }, (_, step) => schedule(step, steps))
}

describe.each(Object.entries(falling))('T4: %s', (name, make) => {
  const usual = floors[name as keyof typeof floors]

  it('warm-up 4 of 10: LR(1) is above 0, LR(4) the peak, LR(10) the floor, nothing below', () => {
    for (const floor of [undefined, 0, 0.1, 0.3, 1]) {
      const end = floor ?? usual
      const all = rates(make(floor === undefined ? { warmup: 4 } : { warmup: 4, floor }), 10)
      expect(all.slice(0, 4)).toEqual([0.25, 0.5, 0.75, 1])
      expect(all[9]).toBe(end)
      for (let i = 4; i < 10; i++) {
        expect(all[i]).toBeGreaterThanOrEqual(end)
        expect(all[i]).toBeLessThanOrEqual(all[i - 1] as number)
      }
    }
  })
  it.each([1, 2, 3, 7, 10, 1000])(
    'every warm-up of %d steps is defined: it has its peak, and its floor if a step is left',
    (steps) => {
      for (const warmup of [...new Set([0, 1, Math.floor(steps / 2), steps - 1, steps, steps + 5])]) {
        const all = rates(make({ warmup, floor: 0.3 }), steps)
        for (const x of all) expect(x > 0 && x <= 1).toBe(true)
        if (warmup <= steps) expect(Math.max(...all)).toBe(1)
        if (steps > warmup + 1) expect(all.at(-1)).toBe(0.3)
        else if (steps >= warmup) expect(all.at(-1)).toBe(1)
        // further steps than were announced stay at the end
        expect(make({ warmup, floor: 0.3 })(steps + 3, steps)).toBeLessThanOrEqual(1)
      }
    },
  )
  it('refuses nonsense by name', () => {
    expect(() => make({ warmup: -1 })).toThrow(`${name}: warmup is -1 and must be an integer of at least 0`)
    expect(() => make({ warmup: 1.5 })).toThrow('warmup is 1.5')
    expect(() => make({ floor: 2 })).toThrow(`${name}: floor is 2 and must be between 0 and 1`)
    expect(() => make({ flor: 0 } as object)).toThrow(`${name}: option 'flor' is unknown`)
  })
})

it('cosine is half-way in the middle, linear a line', () => {
  expect(cosine({ floor: 0 })(50, 101)).toBeCloseTo(0.5, 15)
  expect(rates(linear({ warmup: 1 }), 6)).toEqual([1, 1, 0.75, 0.5, 0.25, 0])
})

describe('wsd', () => {
  it('is 1 until the last steps, then a line', () => {
    expect(rates(wsd({ warmup: 2, decay: 4 }), 10)).toEqual([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    expect(rates(wsd(), 20).slice(-4)).toEqual([1, 1, 0.5, 0])
  })
  it('decays over 0 steps, or over no more than there are', () => {
    expect(rates(wsd({ decay: 0 }), 4)).toEqual([1, 1, 1, 1])
    expect(rates(wsd({ warmup: 1, decay: 100 }), 6)).toEqual([1, 1, 0.75, 0.5, 0.25, 0])
    expect(rates(wsd({ decay: 100 }), 1)).toEqual([1])
    expect(() => wsd({ decay: -1 })).toThrow('wsd: decay is -1 and must be an integer of at least 0')
  })
})

it('constant', () => {
  expect(rates(constant({ warmup: 2 }), 4)).toEqual([0.5, 1, 1, 1])
})
