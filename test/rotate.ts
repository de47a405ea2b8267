// Queries and keys turned by position, in float64: what rope and products that turn are held against.
import { type Given, matrix } from './values.ts'

/** The rotated qkv; `size` for the size of what is summed. */
export function rotate({ qkv, table, starts, B, T, H, J, D, direction }: Given, size = false) {
  const half = D / 2
  return matrix(B * T, (H + 2 * J) * D, (m, n) => {
    if (n >= (H + J) * D) return qkv(m, n)
    const i = n % D
    const position = (m % T) - (starts ? starts(m) : 0)
    const cosine = table(position, i % half)
    const sine = direction * table(position, half + (i % half))
    const other = qkv(m, i < half ? n + half : n - half)
    if (size) return Math.abs(qkv(m, n) * cosine) + Math.abs(other * sine)
    return i < half ? qkv(m, n) * cosine - other * sine : qkv(m, n) * cosine + other * sine
  })
}
