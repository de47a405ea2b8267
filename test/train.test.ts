// coat-train end to end: configurations, runs that stop and go on, token files from all cores, and kills during saves.
import { spawn, spawnSync } from 'node:child_process'
import { cpSync, existsSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs'
import { dirname, join, resolve } from 'node:path'
import { createInterface } from 'node:readline'
import { describe, expect, it } from 'vitest'
import {
  ByteTokenizer,
  CoatError,
  encodeDocuments,
  HuggingFaceTokenizer,
  LlamaForCausalLM,
  recipes,
  TokenDataset,
  type Tokenizer,
  writeTokens,
} from '../lib/index.ts'
import { coatTrain } from '../train/cli.ts'
import { checkedConfig, parseJsonc, problemsOf, readConfig } from '../train/config.ts'
import { template } from '../train/template.ts'
import { eachInFolder } from './folders.ts'
import { Random, sentence } from './values.ts'

const cli = join(import.meta.dirname, '../dist/train/cli.js')
const stories = join(resolve(process.env.COAT_TEST_DATA ?? '../shared/data'), 'stories260k')
const there = existsSync(join(stories, 'config.json'))
if (!there) console.warn(`stories260k skipped: ${stories} is not there (set COAT_TEST_DATA)`)

let folder = ''
eachInFolder((path) => {
  folder = path
})

const small = {
  model: {
    config: {
      hidden_size: 32,
      intermediate_size: 48,
      num_hidden_layers: 1,
      num_attention_heads: 4,
      max_position_embeddings: 64,
    },
  },
  recipe: 'coat',
  device: 'cpu',
  data: { text: 'book.txt', sequence: 16, seed: 3 },
  batch: 2,
  accumulate: 2,
  steps: 30,
  optimizer: { lr: 0.01 },
  schedule: { name: 'wsd', warmup: 3, decay: 5 },
  validate: { every: 10, sequences: 4 },
  checkpoint: { every: 10, keep: 2 },
  out: 'out',
}

function write(config: object, name = 'config.json'): void {
  writeFileSync(join(folder, 'book.txt'), sentence.repeat(60))
  writeFileSync(join(folder, name), JSON.stringify(config))
}
function run(...args: string[]) {
  return spawnSync(process.execPath, [cli, ...args], { cwd: folder, encoding: 'utf8' })
}
interface Line {
  step: number
  loss: number
  lr: number
  validation?: number
}
function metrics(out = 'out'): Line[] {
  const lines = readFileSync(join(folder, out, 'metrics.jsonl'), 'utf8')
    .trim()
    .split('\n')
  return lines.map((line) => JSON.parse(line)).map(({ step, loss, lr, validation }) => ({ step, loss, lr, validation }))
}

describe('a configuration', () => {
  it('is JSON with comments and last commas, outside of texts', () => {
    const source = '{ // one\n "a": "//x /* y */ ,]", /* two\n */ "b": [1, 2, // three\n ], "c": "\\",}" ,\n}'
    expect(parseJsonc(source)).toEqual({ a: '//x /* y */ ,]', b: [1, 2], c: '",}' })
    expect(() => parseJsonc('{ "a": 1,, }')).toThrow(/JSON/)
  })

  it('has all its problems named, with the nearest right key', () => {
    const wrong = {
      ...small,
      modle: 1,
      batch: 0,
      data: { ...small.data, seqence: 3, heldOut: 2, jsonl: 'x' },
      optimizer: { rule: 'adamw', m: 'f32', learningRate: 3, beta: [0.9, 0.99], momentum: 0.9, betas: [1] },
      schedule: { name: 'cosin', floor: 0.1 },
      checkpoint: 5,
      validate: {},
      recipe: 'cot',
    }
    const names = Object.keys(recipes).join(', ')
    expect(problemsOf(wrong).sort()).toEqual(
      [
        'batch is 0 and must be an integer of at least 1',
        'checkpoint is 5 and must be an object with every, keep',
        'data has text and jsonl and must have one of tokens, text, jsonl',
        'data.heldOut is 2 and must be a number from 0 to 1',
        'data.seqence is unknown; did you mean data.sequence?',
        'modle is unknown; did you mean model?',
        'optimizer.beta is unknown; did you mean optimizer.betas?',
        'optimizer.betas is [1] and must be a list of 2 numbers',
        'optimizer.learningRate is unknown; the keys are rule, lr, weightDecay, rounding, seed, parameters, betas, eps, vFloor, allowUnsafe',
        'optimizer.m is unknown; the keys are rule, lr, weightDecay, rounding, seed, parameters, betas, eps, vFloor, allowUnsafe',
        'optimizer.momentum is unknown; the keys are rule, lr, weightDecay, rounding, seed, parameters, betas, eps, vFloor, allowUnsafe',
        `recipe is "cot" and must be a recipe, or { "base": a recipe, and axes that differ }: 'cot' is unknown; the recipes are ${names}`,
        'schedule.name is "cosin" and must be one of constant, linear, cosine, wsd',
        'validate.every is missing',
      ].sort(),
    )
    expect(problemsOf([])).toEqual(['the configuration must be a JSON object'])
    expect(problemsOf({})).toEqual(['model', 'data', 'batch', 'steps', 'out'].map((name) => `${name} is missing`))
    expect(problemsOf({ ...small, model: {} })).toEqual(['model has none of them and must have one of from, config'])
    expect(() => checkedConfig({ ...small, batch: 0 }, 'a.json')).toThrow('a.json has a problem:\n  batch is 0')
  })

  it('has defaults, and takes changes', () => {
    write(small)
    const config = readConfig(join(folder, 'config.json'), ['optimizer.lr=1e-3', 'spike.sigma=4', 'out=else', 'clip=0'])
    expect(config).toMatchObject({
      clip: 0,
      maxSkips: 10,
      out: 'else',
      spike: { sigma: 4 },
      optimizer: { rule: 'adamw', lr: 0.001 },
      data: { heldOut: 0.05 },
    })
    expect(() => readConfig(join(folder, 'config.json'), ['clip'])).toThrow("'clip' must be key=value")
    expect(() => readConfig(join(folder, 'config.json'), ['clip=-1'])).toThrow('clip is -1 and must be a number of at')
  })

  it('takes a recipe as changes of another, whose name and axes are checked, and loss scaling', () => {
    const changed = { ...small, recipe: { base: 'te-delayed', dw: 'bf16', m: 'bf16', v: 'bf16' } }
    expect(problemsOf(changed)).toEqual([])
    expect(checkedConfig(changed, 'a.json').recipe).toEqual(changed.recipe)
    const wrong = (more: object) => problemsOf({ ...small, ...more })
    expect(wrong({ recipe: { base: 'te-delay', dw: 'bf16' } })).toEqual([
      expect.stringMatching(
        /^recipe is .* and must be a recipe, or \{ "base": .*\}: 'te-delay' is unknown; the recipes are fp32, /,
      ),
    ])
    expect(wrong({ recipe: { base: 'coat', dv: 'bf16' } })).toEqual([
      expect.stringMatching(/axis 'dv' is unknown; the axes are/),
    ])
    expect(wrong({ recipe: { base: 'coat', m: 'f32' } })).toEqual([
      expect.stringMatching(/m and v must be a pair of formats that adamw has/),
    ])
    expect(wrong({ lossScale: 'dynamic', mu: 'none' })).toEqual([])
    expect(wrong({ lossScale: { growth: 0 }, mu: 'paper' })).toEqual([
      expect.stringMatching(
        /^lossScale is \{"growth":0\} and must be .*growth is 0 and must be a number of at least 1/,
      ),
      'mu is "paper" and must be one of none, fixed, absolute, relative',
    ])
  })

  it('that init writes is right', () => {
    expect(problemsOf(parseJsonc(template))).toEqual([])
    expect(run('init').status).toBe(0)
    expect(readFileSync(join(folder, 'config.json'), 'utf8')).toBe(template)
    const again = run('init')
    expect([again.status, again.stderr]).toEqual([1, 'error: config.json is there already\n'])
  })
})

describe('what is wrong is said in a line that names it, before there is anything in out:', () => {
  const text = { text: 'book.txt', sequence: 16 }
  const files: Record<string, string | Buffer> = {
    'cut.json': '{ // a\n "batch": 1',
    'none.json': '',
    'empty.txt': ' \n',
    'short.txt': 'short',
    'binary.txt': Buffer.from([0x61, 0x00, 0x62]),
    'latin.txt': Buffer.from('caf\xe9 '.repeat(100), 'latin1'),
    'bad.jsonl': '{"text": 5}\n',
    'broken/config.json': '{ "hidden_size": ',
    'odd/tokenizer.json': '{}',
  }
  const bytes = [...new ByteTokenizer().encode(sentence.repeat(20))]
  const cases: [string, object | string, RegExp, ...string[]][] = [
    ['no configuration', 'nowhere.json', /^nowhere.json cannot be read: ENOENT/],
    ['a folder', 'broken', /^broken cannot be read: EISDIR/],
    ['JSON that ends', 'cut.json', /^cut.json, line 2: is no JSON: /],
    ['an empty file', 'none.json', /^none.json: is no JSON: /],
    ['an axis of a recipe', { recipe: { base: 'coat', w: 'f33' } }, /: w is 'f33' and must be one of 'f32', 'bf16'/],
    [
      'axes that do not go together',
      { recipe: { base: 'coat', x: 'e4m3/r' } },
      /: x, w and dy must be f32, f32, f32; or bf16, bf16, bf16; or e4m3/,
    ],
    ['an unknown axis', { recipe: { base: 'coat', ww: 'bf16' } }, /: axis 'ww' is unknown; the axes are x, w/],
    ['an unknown base', { recipe: { base: 'cot' } }, /: 'cot' is unknown; the recipes are fp32/],
    ['a recipe in part', { recipe: { x: 'bf16' } }, /, or all axes: w is undefined and must be/],
    ['no text', { data: { ...text, text: 'nowhere.txt' } }, /^data.text: nowhere.txt cannot be read: ENOENT/],
    ['an empty text', { data: { ...text, text: 'empty.txt' } }, /^data.text: empty.txt: .* hold no text$/],
    [
      'a short text',
      { data: { ...text, text: 'short.txt' } },
      /^data.text: short.txt: .*4 tokens and must have at least/,
    ],
    [
      'a folder without texts',
      { data: { ...text, text: 'broken' } },
      /^data.text: broken has no file that ends in .txt/,
    ],
    [
      'bytes for a text',
      { data: { ...text, text: 'binary.txt' } },
      /^data.text: binary.txt has a NUL at byte 1 and must/,
    ],
    [
      'another encoding',
      { data: { ...text, text: 'latin.txt' } },
      /^data.text: latin.txt is no UTF-8 and must be text/,
    ],
    [
      'tokens for a text',
      { data: { ...text, text: 'tokens.bin' } },
      /^data.text: tokens.bin holds tokens, .* is for data.tokens/,
    ],
    [
      'a line of JSON lines',
      { data: { jsonl: 'bad.jsonl', sequence: 16 } },
      /^data.jsonl: .*bad.jsonl, line 1: text is 5/,
    ],
    [
      'a folder for JSON lines',
      { data: { jsonl: 'odd', sequence: 16 } },
      /^data.jsonl: .*odd is a folder and must be a file/,
    ],
    [
      'a text for tokens',
      { data: { tokens: 'book.txt', sequence: 16 } },
      /^data.tokens: .*book.txt starts with "Four sco" and/,
    ],
    [
      'a folder for tokens',
      { data: { tokens: 'odd', sequence: 16 } },
      /^data.tokens: .*odd is a folder and must be a file/,
    ],
    [
      'tokens cut off',
      { data: { tokens: 'cut.bin', sequence: 16 } },
      /^data.tokens: .*cut.bin has 100 bytes and must have/,
    ],
    [
      'a tokenizer',
      { data: { ...text, tokenizer: 'odd' } },
      /^data.tokenizer: .*odd\/tokenizer.json has no model.vocab/,
    ],
    [
      'a vocabulary',
      { model: { config: { ...small.model.config, vocab_size: 100 } } },
      /vocab_size is 100 and must be at least 256, the vocabulary of the data/,
    ],
    [
      'a sequence',
      { data: { ...text, sequence: 65 } },
      /^data.sequence is 65 and must be at most 64, the model's max_position_emb/,
    ],
    [
      'a size',
      { model: { config: { ...small.model.config, num_attention_heads: 5 } } },
      /^model: config: hidden_size is 32 and must give/,
    ],
    [
      'a field of the model',
      { model: { config: { ...small.model.config, hiden_size: 5 } } },
      /^model: config: hiden_size is 5 and is not known/,
    ],
    [
      'no model',
      { model: { from: 'odd' } },
      /^model.from: .*odd\/config.json cannot be read: ENOENT/,
      'odd/tokenizer.json',
    ],
    ['a model that is no JSON', { model: { from: 'broken' } }, /^model.from: .*broken\/config.json is no JSON: /],
    [
      'a sample without its tokenizer',
      { data: { tokens: 'wide.bin', sequence: 16 }, sample: { prompt: 'a' } },
      /^sample needs data.tokenizer, .* a vocabulary of 300, and bytes have one of 256/,
    ],
    ['--allow', {}, /^--allow is for a run that goes on and needs --resume/, '--allow', 'clip'],
    ['--resume', {}, /^resume: out\/checkpoints has no complete checkpoint/, '--resume'],
  ]
  it.each(cases)('%s', async (_, changes, message, ...flags) => {
    write({ ...small, ...(typeof changes === 'object' ? changes : {}) })
    for (const [name, content] of Object.entries(files)) {
      if (flags.includes(name)) continue
      mkdirSync(join(folder, dirname(name)), { recursive: true })
      writeFileSync(join(folder, name), content)
    }
    await writeTokens(join(folder, 'tokens.bin'), bytes, { vocabulary: 256 })
    await writeTokens(join(folder, 'wide.bin'), bytes, { vocabulary: 300 })
    writeFileSync(join(folder, 'cut.bin'), readFileSync(join(folder, 'tokens.bin')).subarray(0, 100))
    const file = typeof changes === 'string' ? changes : 'config.json'
    const before = process.cwd()
    process.chdir(folder)
    try {
      const said: string[] = []
      const args = flags.filter((flag) => !Object.hasOwn(files, flag))
      const error = await coatTrain([file, ...args], (line) => said.push(line)).catch((caught) => caught)
      expect(error).toBeInstanceOf(CoatError)
      expect(error.message.replace(/^config.json has a problem:\n {2}recipe is .*? differ }/, '')).toMatch(message)
      expect(error.message.split('\n').length).toBeLessThanOrEqual(2)
      expect(existsSync('out')).toBe(false)
    } finally {
      process.chdir(before)
    }
  })
})

describe('a run', () => {
  it('leaves metrics, events, a report, checkpoints and a model; problems are one message', async () => {
    write({ ...small, sample: { prompt: 'Four ', maxTokens: 8 } })
    const { status, stdout, stderr } = run('config.json')
    expect(stderr).toMatch(/coat {2}step 30\/30/)
    expect(status).toBe(0)
    const lines = metrics()
    expect(lines.map(({ step }) => step)).toEqual(Array.from({ length: 30 }, (_, i) => i + 1))
    expect(lines.filter(({ validation }) => validation !== undefined).map(({ step }) => step)).toEqual([10, 20, 30])
    expect(stdout).toContain(`held-out loss ${lines[29]?.validation?.toFixed(4)}`)
    expect(stdout).toContain('\nFour ')
    expect(readdirSync(join(folder, 'out')).sort()).toEqual([
      'checkpoints',
      'metrics.jsonl',
      'model',
      'report.html',
      'tensorboard',
    ])
    expect(readdirSync(join(folder, 'out/checkpoints')).sort()).toEqual(['step-00000020', 'step-00000030'])
    expect(readFileSync(join(folder, 'out/report.html'), 'utf8')).toContain('30 steps of 4 × 16 tokens, coat.')
    using model = await LlamaForCausalLM.fromPretrained(join(folder, 'out/model'), { recipe: 'fp32' })
    expect(model.config.vocab_size).toBe(256)
    // the same again would end this run
    const before = metrics()
    const bad = run('config.json', '--set', 'steps=31')
    expect([bad.status, bad.stdout]).toEqual([1, ''])
    expect(bad.stderr).toBe(
      'error: out/checkpoints/step-00000030 is of a run that --resume goes on with; a new one needs another out, or out to be removed\n',
    )
    expect(metrics()).toEqual(before)
  })

  it('with changes of a recipe trains after them and says so', async () => {
    const recipe = { base: 'coat', v: 'e5m2/x128', param: 'bf16', rounding: 'stochastic', lossScale: 'dynamic' }
    write({ ...small, recipe, steps: 6, schedule: { name: 'constant' }, validate: undefined, checkpoint: { every: 3 } })
    const { status, stdout } = run('config.json')
    expect(status).toBe(0)
    expect(stdout).toMatch(/parameters, custom, /)
    const at = join(folder, 'out/checkpoints/step-00000006')
    const { settings, lossScale } = JSON.parse(readFileSync(join(at, 'trainer.json'), 'utf8'))
    const { m, v, param } = recipes.coat
    expect([m, v, param]).toEqual(['e4m3/x128', 'e4m3/x128', 'f32'])
    expect(settings).toMatchObject({
      'recipe.m': m,
      'recipe.v': 'e5m2/x128',
      'recipe.param': 'bf16',
      'recipe.saved': 'e4m3/g16',
    })
    expect(lossScale).toEqual({ scale: 65_536, clean: 6 })
    const log = readFileSync(join(folder, 'out/metrics.jsonl'), 'utf8').trim().split('\n')
    expect(log.map((line) => JSON.parse(line).lossScale)).toEqual(Array.from({ length: 6 }, () => 65_536))
    expect(run('config.json', '--set', 'out=else', '--set', 'recipe.v=f32').stderr).toMatch(/m and v must be a pair/)
    expect(run('config.json', '--resume', '--set', 'recipe.base=coat-paper', '--set', 'steps=7').status).toBe(0)
  })

  /** Sends signals when the first steps are reported; resolves to how the process ended. */
  function interrupted(signals: readonly NodeJS.Signals[], ...args: string[]) {
    return new Promise<{ code: number | null; signal: string | null; stdout: string }>((done, fail) => {
      const child = spawn(process.execPath, [cli, ...args], { cwd: folder, stdio: ['ignore', 'pipe', 'pipe'] })
      let stdout = ''
      child.stdout.setEncoding('utf8').on('data', (text) => {
        stdout += text
      })
      createInterface({ input: child.stderr }).once('line', () => {
        for (const signal of signals) child.kill(signal)
      })
      child.on('error', fail)
      child.on('close', (code, signal) => done({ code, signal, stdout }))
    })
  }

  it.each([
    ['SIGINT', 130],
    ['SIGTERM', 143],
  ] as const)('K1: %s saves, exits with %d, and --resume goes on exactly', async (signal, status) => {
    const long = { ...small, steps: 400, schedule: { name: 'constant' }, checkpoint: { every: 1000 } }
    write(long)
    const { code, stdout } = await interrupted([signal], 'config.json')
    expect(code).toBe(status)
    expect(stdout).toMatch(new RegExp(`stopped by ${signal}; step \\d+ is saved, --resume goes on from it`))
    const done = Number(/step (\d+) is saved/.exec(stdout)?.[1])
    expect(done).toBeGreaterThan(0)
    expect(done).toBeLessThan(400)
    expect(readdirSync(join(folder, 'out/checkpoints'))).toEqual([`step-${String(done).padStart(8, '0')}`])
    const until = `steps=${done + 6}`
    expect(run('config.json', '--resume', '--set', until).stdout).toContain(`warning: steps is 400 in the checkpoint`)
    const resumed = metrics()
    expect(run('config.json', '--set', until, '--set', 'out=whole').status).toBe(0)
    const whole = metrics('whole')
    expect(resumed.map(({ step, loss, lr }) => [step, loss, lr])).toEqual(
      whole.map(({ step, loss, lr }) => [step, loss, lr]),
    )
  })

  it('K1: a second signal quits at once, and what is saved stays valid', async () => {
    write({ ...small, steps: 400, schedule: { name: 'constant' }, checkpoint: { every: 1, keep: 2 } })
    const { code, signal } = await interrupted(['SIGINT', 'SIGINT'], 'config.json')
    expect(code === 130 || signal === 'SIGINT').toBe(true)
    expect(run('config.json', '--resume', '--set', 'steps=30').stdout).toMatch(/resumed .*step-/)
  })

  it('T7: lines of steps after the checkpoint are dropped, and said to be', () => {
    write(small)
    expect(run('config.json').status).toBe(0)
    const whole = metrics()
    cpSync(join(folder, 'out/checkpoints/step-00000020'), join(folder, 'out/checkpoints/kept'), { recursive: true })
    spawnSync('rm', ['-r', join(folder, 'out/checkpoints/step-00000030'), join(folder, 'out/checkpoints/kept')])
    const { stdout, status } = run('config.json', '--resume')
    expect(status).toBe(0)
    expect(stdout).toContain('out/metrics.jsonl: dropped 10 lines of steps after 20')
    expect(metrics()).toEqual(whole)
    expect(readdirSync(join(folder, 'out/tensorboard'))).toHaveLength(2)
    expect(run('config.json', '--resume', '--set', 'optimizer.lr=0.5').stderr).toMatch(
      /optimizer.lr is 0.01 in the checkpoint and 0.5 here; settings must be equal, or be named in allow/,
    )
  })

  it('D5: data without text ends before there is a model', () => {
    write(small)
    writeFileSync(join(folder, 'empty.jsonl'), '\n\n{"text": ""}\n')
    const config = { ...small, data: { jsonl: 'empty.jsonl', sequence: 16 } }
    writeFileSync(join(folder, 'config.json'), JSON.stringify(config))
    const { stderr, stdout, status } = run('config.json')
    expect([status, stdout]).toEqual([1, ''])
    expect(stderr).toMatch(/empty.jsonl hold no document/)
  })
})

it.skipIf(!there)(
  'fine-tunes a folder on chats, with frozen parameters, and leaves another with its tokenizer',
  async () => {
    const message = (role: string, i: number) => ({ role, content: `The dog has ${i} balls.` })
    const chats = Array.from({ length: 60 }, (_, i) => ({
      messages: [message('user', i), message('assistant', i + 1)],
    }))
    const config = {
      ...small,
      model: { from: stories },
      freeze: ['model.embed_tokens.*', '*layers.0.*'],
      data: { jsonl: 'chats.jsonl', sequence: 64 },
      steps: 10,
      save: { dtype: 'bf16' },
    }
    write(config)
    writeFileSync(join(folder, 'chats.jsonl'), chats.map((chat) => `${JSON.stringify(chat)}\n`).join(''))
    const { status, stderr } = run('config.json')
    expect(status, stderr).toBe(0)
    const lines = metrics()
    expect(lines.at(-1)?.loss).toBeLessThan(lines[0]?.loss as number)
    const out = join(folder, 'out/model')
    expect(readdirSync(out).sort()).toEqual([
      'config.json',
      'model.safetensors',
      'tokenizer.json',
      'tokenizer_config.json',
    ])
    using was = await LlamaForCausalLM.fromPretrained(stories, { recipe: 'bf16' })
    using is = await LlamaForCausalLM.fromPretrained(out, { recipe: 'bf16' })
    for (const [i, { name, tensor }] of was.parameters().entries()) {
      const same = Buffer.compare(
        await tensor.readBytes(),
        (await is.parameters()[i]?.tensor.readBytes()) ?? new Uint8Array(),
      )
      const frozen = name.startsWith('model.embed_tokens') || name.includes('layers.0.')
      // norms are saved in bf16 too, where a small change may vanish
      if (frozen && !name.includes('norm')) expect(same, name).toBe(0)
      if (!frozen && !name.includes('norm')) expect(same, name).not.toBe(0)
    }
  },
)

describe('prepare', () => {
  const texts = ['Call me Ishmael.', '', 'Some years ago, \u2028 never mind how long precisely.', 'É\n\nü 🐋']

  async function expectTokens(file: string, tokenizer: Tokenizer): Promise<void> {
    const goal = [...encodeDocuments(texts, tokenizer)].flatMap((ids) => [...ids])
    const bytes = readFileSync(file).subarray(32)
    expect([...new Uint16Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length))]).toEqual(goal)
    using data = await TokenDataset.open(file, { sequence: 4, heldOut: 0 })
    expect(data.tokens).toBe(goal.length)
  }

  it.skipIf(!there).each([1, 3])('with %d threads: the ids of the documents in their order', async (threads) => {
    mkdirSync(join(folder, 'texts/deep'), { recursive: true })
    for (const [i, text] of texts.slice(0, 2).entries()) writeFileSync(join(folder, `texts/${i}.txt`), text)
    const lines = texts.slice(2).map((text) => JSON.stringify({ text }))
    writeFileSync(join(folder, 'texts/deep/more.jsonl'), `${lines.join('\n')}\n`)
    const { status, stdout, stderr } = run(
      ...['prepare', 'texts', '--out', 'all.bin', '--tokenizer', stories, '--threads', String(threads)],
    )
    expect(status, stderr).toBe(0)
    expect(stdout).toMatch(/^all.bin: \d+ tokens of 3 documents\n$/)
    expect(stderr).toMatch(/tokenizing 100 %/)
    await expectTokens(join(folder, 'all.bin'), await HuggingFaceTokenizer.open(stories))
  })

  it('takes bytes without a tokenizer; refuses chats, bad lines and empty folders by name', async () => {
    for (const [i, text] of texts.entries()) writeFileSync(join(folder, `${i}.txt`), text)
    expect(run('prepare', '0.txt', '1.txt', '2.txt', '3.txt', '--out', 'all.bin').status).toBe(0)
    await expectTokens(join(folder, 'all.bin'), new ByteTokenizer())
    writeFileSync(join(folder, 'chat.jsonl'), '{"text": "a"}\n{"messages": []}\n')
    expect(run('prepare', 'chat.jsonl', '--out', 'chat.bin').stderr).toMatch(/chat.jsonl, line 2: must have a 'text'/)
    writeFileSync(join(folder, 'bad.jsonl'), '{"text": "a"\n')
    expect(run('prepare', 'bad.jsonl', '--out', 'bad.bin').stderr).toMatch(/bad.jsonl, line 1: is no JSON/)
    mkdirSync(join(folder, 'none'))
    expect(run('prepare', 'none', '--out', 'bad.bin').stderr).toMatch(/none has no file that ends in .txt or .jsonl/)
    writeFileSync(join(folder, 'empty.txt'), '')
    expect(run('prepare', 'empty.txt', '--out', 'bad.bin').stderr).toMatch(/empty.txt hold no text/)
    writeFileSync(join(folder, 'binary.txt'), Buffer.from([0x61, 0]))
    expect(run('prepare', 'binary.txt', '--out', 'bad.bin').stderr).toMatch(/binary.txt has a NUL at byte 1/)
    expect(run('prepare', 'all.bin', '--out', 'bad.bin').stderr).toMatch(/all.bin holds tokens, as coat-train prepare/)
    expect(run('prepare', '0.txt', '--out', 'none').stderr).toMatch(/none cannot be written: it is a folder/)
    expect(run('prepare', '0.txt', '--out', 'bad.bin', '--tokenizer', 'none').stderr).toMatch(
      /tokenizer.json cannot be/,
    )
    expect(readdirSync(folder).filter((name) => /\.bin/.test(name))).toEqual(['all.bin'])
  })
})

const saver = join(import.meta.dirname, 'saver.mjs')

/** Runs test/saver.mjs until `enough(line)`, then kills it; resolves to its lines, and how it ended. */
function killed(dir: string, resume: boolean, enough: (line: string) => boolean) {
  return new Promise<{ lines: string[]; signal: string | null }>((done, fail) => {
    const child = spawn(process.execPath, [saver, dir, ...(resume ? ['resume'] : [])], {
      stdio: ['ignore', 'pipe', 'inherit'],
    })
    const lines: string[] = []
    let rest = ''
    child.stdout.setEncoding('utf8').on('data', (text: string) => {
      const parts = (rest + text).split('\n')
      rest = parts.pop() as string
      for (const line of parts) {
        lines.push(line)
        if (enough(line)) child.kill('SIGKILL')
      }
    })
    child.on('error', fail)
    child.on('close', (_, signal) => done({ lines, signal }))
  })
}

it('C3: killed with SIGKILL at 20 random instants of saves, the latest checkpoint always loads', async () => {
  const random = new Random(20)
  const dir = join(folder, 'checkpoints')
  const stepOf = (lines: readonly string[], what: string) =>
    Number(
      lines
        .filter((line) => line.startsWith(what))
        .at(-1)
        ?.split(' ')[1] ?? 0,
    )
  let saved = 0
  for (let round = 0; round < 20; round++) {
    let left = 1 + Math.floor(random.uniform() * 150)
    let begun = false
    const { lines, signal } = await killed(dir, saved > 0, (line) => {
      begun ||= line.startsWith(saved > 0 ? 'resumed' : 'saved')
      if (begun && !line.includes(' ')) left -= 1
      return left <= 0
    })
    expect(signal).toBe('SIGKILL')
    const resumed = stepOf(lines, 'resumed')
    // what was said to be saved is there; one more that was not may be too
    if (saved > 0) expect([saved, saved + 1]).toContain(resumed)
    saved = Math.max(resumed, stepOf(lines, 'saved'))
  }
  expect(saved).toBeGreaterThan(10)
  const { lines } = await killed(dir, true, (line) => line.startsWith('saved'))
  expect(stepOf(lines, 'resumed')).toBeGreaterThanOrEqual(saved)
  // leftovers of kills go with the next save
  expect(readdirSync(dir).filter((name) => name.startsWith('.')).length).toBeLessThanOrEqual(1)
})

it('C3: a disk that takes half a checkpoint leaves the one before, and the run goes on when there is room', async () => {
  const dir = join(folder, 'checkpoints')
  const { lines } = await killed(dir, false, (line) => line === 'saved 2')
  expect(lines.at(-1)).not.toBe('')
  const saved = () => readdirSync(dir).filter((name) => name.startsWith('step-'))
  const before = saved()
  const newest = join(dir, before.sort().at(-1) as string)
  const half = Math.floor(statSync(join(newest, 'model.safetensors')).size / 2048)
  expect(half).toBeGreaterThan(1)
  // the system refuses what goes beyond this many KiB of a file, after it took what fits
  const limited = spawnSync(
    'bash',
    ['-c', 'ulimit -f "$0" && exec "$@"', String(half), process.execPath, saver, dir, 'resume'],
    { encoding: 'utf8' },
  )
  expect(limited.stderr).toMatch(/saveCheckpoint: .* cannot be written: EFBIG/)
  expect(limited.stdout).toMatch(/^write$/m)
  expect(limited.status).toBe(1)
  expect(readdirSync(dir).sort()).toEqual(before.sort())
  const again = await killed(dir, true, (line) => line.startsWith('saved'))
  expect(again.lines.find((line) => line.startsWith('resumed'))).toBe(`resumed ${Number(newest.slice(-8))}`)
})
