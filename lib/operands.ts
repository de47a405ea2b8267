// Who looks at the operands of products as they are made.
import type { Tensor } from './tensor.ts'

/** An operand of a product of training. */
export interface Operand {
  /** The name of the weight. */
  name: string
  operand: 'x' | 'w' | 'dy'
  tensor: Tensor
}

let watcher: ((operand: Operand) => void) | null = null

/** Calls `watch` with the operands of products that are recorded, and of the gradients of their inputs; null ends it. */
export function watchOperands(watch: ((operand: Operand) => void) | null): void {
  watcher = watch
}

/** Shows operands of a product with the weight w. */
export function showOperands(w: Tensor, operands: Partial<Record<Operand['operand'], Tensor>>): void {
  if (!watcher) return
  const name = w.sink?.name ?? ''
  for (const [operand, tensor] of Object.entries(operands))
    watcher({ name, operand: operand as Operand['operand'], tensor })
}
