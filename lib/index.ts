// What users import.
export { type ParameterBytes, parameterBytes, type RecipeChange, recipe } from './axes.ts'
export { type CachedSizes, KeyValues } from './cache.ts'
export {
  type Checkpointed,
  type CheckpointOptions,
  loadCheckpoint,
  type Resumed,
  saveCheckpoint,
} from './checkpoint.ts'
export {
  type ChangeValues,
  type Choice,
  handOver,
  type LayerSearch,
  type LayerSearchOptions,
  Muppet,
  type MuppetOptions,
  type Picked,
  type PickOptions,
  PrecisionSwitch,
  pickConfiguration,
  type SwitchOptions,
  searchLayers,
} from './controllers.ts'
export {
  type Batch,
  type DataState,
  type Dataset,
  OrderedDataset,
  type OrderOptions,
  TextDataset,
  type TextOptions,
} from './data.ts'
export { type Evaluation, evaluate, type PerplexityOptions, perplexity, type Scorer } from './evaluate.ts'
export {
  AutomaticMu,
  type Exchange,
  type GradientSum,
  type MuOptions,
  type MuReading,
  type MuSetting,
  RankedGradients,
  SentGradients,
  saturatedShare,
  sumGradients,
} from './exchange.ts'
export type { GenerateOptions } from './generate.ts'
export { GridDescent, type GridOptions, morrisEstimate } from './grid.ts'
export type { SpikeOptions } from './guard.ts'
export {
  type Document,
  JsonlDataset,
  type JsonlOptions,
  type Role,
  readJsonl,
  type TurnMarks,
  turnMarks,
} from './jsonl.ts'
export { LossScale, type LossScaleState } from './lossscale.ts'
export { type LlamaConfig, LlamaForCausalLM, type ModelOptions } from './models/llama.ts'
export {
  Attention,
  Block,
  type Build,
  build,
  gradientOf,
  LayerNorm,
  Linear,
  linearFormats,
  MLP,
  Module,
  matrixParam,
  Param,
  RMSNorm,
  Sequential,
} from './modules.ts'
export { CoatError, type MemoryUsage } from './native.ts'
export * as ops from './ops.ts'
export {
  AdamW,
  type AdamWOptions,
  type AdamWOverride,
  adamw,
  type FullOptions,
  type GradientNorm,
  Lion,
  type LionOptions,
  type LionOverride,
  lion,
  Optimizer,
  optimizerOf,
  type ParamState,
  type PartOf,
  type Rounding,
  Sgd,
  type SgdOptions,
  type SgdOverride,
  sgd,
} from './optimizer.ts'
export { type Piece, partitionFlat, partitionWhole } from './partition.ts'
export {
  type Accumulator,
  accumulated,
  type CodeShares,
  codeShares,
  GradientDiversity,
  type LogitModel,
  modelSharpness,
  OperandProbe,
  type OperandShares,
  sharpness,
} from './probes.ts'
export { localRanks, type Ranks } from './ranks.ts'
export {
  type Arithmetic,
  type DelayedScaling,
  type DynamicLossScale,
  type Emulation,
  type LayerRecipe,
  type LossScaling,
  type Recipe,
  type RecipeName,
  recipes,
} from './recipes.ts'
export { MetricsFile, Progress, reportHtml } from './report.ts'
export {
  type Dtype,
  readSafetensors,
  type Stored,
  StoredTensor,
  type TensorSource,
  type WriteOptions,
  writeSafetensors,
} from './safetensors.ts'
export { DelayedScale, type PlacedScale, PowerOfTwoScale } from './scaler.ts'
export {
  constant,
  cosine,
  type Decay,
  linear,
  type Schedule,
  type StableDecay,
  type WarmUp,
  wsd,
} from './schedule.ts'
export { freeze, load, type State, stateDict, type Values } from './state.ts'
export { type LedgerRow, noGrad, type Recompute, Tape } from './tape.ts'
export {
  type Device,
  type DeviceName,
  device,
  type FloatFormat,
  type Format,
  limitMemory,
  memory,
  resetPeak,
  scope,
  Tensor,
  type TensorOptions,
} from './tensor.ts'
export { EventFile } from './tensorboard.ts'
export {
  ByteTokenizer,
  type EncodeOptions,
  HuggingFaceTokenizer,
  type SpecialIds,
  type Tokenizer,
} from './tokenizer.ts'
export { encodeDocuments, TokenDataset, type TokenOptions, writeTokens } from './tokens.ts'
export {
  type Phase,
  type RunOptions,
  type StepMetrics,
  type TrainableModel,
  Trainer,
  type TrainerCallbacks,
  type TrainerOptions,
} from './trainer.ts'
export { type UpdateQuality, type UpdateShare, UpdateSums } from './updates.ts'
