// One native call of adamw, with its numbers from a rule: for tests of one step.
import type { Handle } from '../lib/native.gen.ts'
import { native } from '../lib/native.ts'

export interface Rule {
  lr: number
  beta1: number
  beta2: number
  eps: number
  decay: number
}
export const usual: Rule = { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0 }

/** What one native call takes besides p, g, m, v and its numbers. */
export interface Extra {
  clip?: Handle | undefined
  master?: Handle[]
  lost?: Handle[]
  rounding?: 'nearest' | 'stochastic' | 'kahan'
  seed?: number
  floor?: boolean
  amax?: Handle[] | undefined
}

/** One native call at step t on lists. */
export function step(
  t: number,
  p: Handle[],
  g: Handle[],
  m: Handle[],
  v: Handle[],
  rule: Rule,
  { clip, master, lost, rounding = 'nearest', seed = 0, floor = false, amax }: Extra = {},
): void {
  const { lr, beta1, beta2, eps, decay } = rule
  const numbers = [lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay] as const
  const corrections = [1 - beta1 ** t, Math.sqrt(1 - beta2 ** t)] as const
  const rest = [amax ?? null, clip ?? null, ...numbers, ...corrections, Number(floor), rounding, seed] as const
  native.adamw(p, master ?? null, lost ?? null, g, m, v, ...rest)
}
