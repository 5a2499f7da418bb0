"""The training recipe: its sections, and what each field means. No torch here.

Sizes carry their unit in the name. Every loss is divided by the count of targets of the whole batch, so
`micro_batch_rows` changes memory and speed and not the result, unless experts drop tokens (`expert_capacity_factor`).
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ...core.recipe import Section
from ...planner.layout import Layout, Schedule, Sharding

if TYPE_CHECKING:
    from ...data.ingest.readers import ReadOptions

Fraction = Annotated[float, Field(ge=0, le=1)]


class Source(Section):
    """One token store of a mixture."""

    path: str
    """Directory of the token store; with data.tokenizer, text."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the tokens that come from it, relative to the other stores; without weights a store's size is its share.
    """


class DataSection(Section):
    """What is read."""

    train: str | list[str | Source] = []
    """Token store to train on, or a list of stores, or of { path, weight }; or text: files, directories, and with
    `tokenizer` globs and datasets:NAME.
    """
    tokenizer: str = ""
    """Artifact, model directory or tokenizer.json with which text is tokenised into the run's cache; "" trains one on
    the files of text that `train` names.
    """
    documents: Literal["file", "line", "block"] = "file"
    """Text: what a document of a .txt or .md file is: the file, a line, or a block between blank lines."""
    field: str = "text"
    """Text: field of .jsonl, column of .csv, .tsv and .parquet."""
    split: str = "train"
    """Text: split of a data set that is read."""
    unwrap: bool = False
    """Text: join the hard-wrapped lines of a paragraph with spaces."""
    skip_front_matter: bool = False
    """Text: leave out the front matter of .md files."""
    validation: str = ""
    """Token store to validate on, or text; "" holds out the end of what is trained on instead."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the training data held out when `validation` is not given; 0 = no validation."""
    packing: Literal["windows", "best_fit"] = "windows"
    """GPT rows: the stream cut every sequence_length tokens, or whole documents fitted together and kept apart."""
    separate_documents: bool = False
    """GPT windows: attention, positions and targets end at document boundaries."""
    random_offsets: bool = True
    """GPT windows: every epoch cuts the stream at another place."""

    def read_options(self) -> "ReadOptions":
        """Return the options that split input text into documents."""
        from ...data.ingest.readers import ReadOptions

        return ReadOptions(self.documents, self.field, self.split, self.unwrap, self.skip_front_matter)

    def sources(self) -> list[Source]:
        """The training stores, each with its weight, if any."""
        given = [self.train] if isinstance(self.train, str) else self.train
        return [item if isinstance(item, Source) else Source(path=item) for item in given]


class ModelSection(Section):
    """What is trained."""

    family: Literal["gpt", "bert"] | None = None
    """Decoder trained on next tokens, or encoder trained on masked ones; by default the preset's, else gpt."""
    preset: str = ""
    """A named shape of models/presets.toml; "" starts from the family's defaults."""
    init_from: str = ""
    """Weights to begin with: a run, checkpoint, model artifact, Hugging Face directory, nanoGPT's or Megatron-LM's."""
    base_width: int = Field(default=0, ge=0)
    """Width of the GPT, with heads of the same width, for which the learning rate was found: first values and AdamW's
    rates of matrices become those with which it stays right at this one (muP); 0 = they stay.
    """
    zero_projections: bool = False
    """The matrices that write into the residual stream begin as 0, so that every block begins as nothing."""
    overrides: dict[str, Any] = {}
    """Fields of the model's config to set: layers, heads, width, dropout... The vocabulary is the token store's."""


class OptimizerSection(Section):
    """How the weights move."""

    name: Literal["adamw", "muon", "lamb", "adafactor"] = "adamw"
    """Muon is for the hidden matrices, with AdamW for the rest; LAMB for batches of thousands of rows; Adafactor keeps
    next to nothing beside the weights and uses neither the betas nor epsilon.
    """
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate of AdamW and LAMB; Adafactor's step relative to the size of the weights."""
    matrix_learning_rate: float = Field(default=0.02, gt=0)
    """Peak learning rate of Muon's matrices; follows the same schedule."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of the gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of its square."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices; biases and norms have none, tables only with LAMB."""
    max_trust_ratio: float | None = Field(default=None, gt=0)
    """Largest trust ratio of LAMB; by default it is not limited."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of a moving average of the weights, by which the run is evaluated, and which all that opens its checkpoints
    takes (eval, export, serve, another run's init_from); 0 = none.
    """


class ScheduleSection(Section):
    """How the learning rate moves."""

    kind: Literal["cosine", "linear", "polynomial", "constant", "wsd", "inverse-sqrt"] = "cosine"
    """Shape of the decay; wsd stays at the peak until the last decay_steps, inverse-sqrt has no end."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from 0."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Length of the decay in steps; by default it ends with the last step (wsd: a fifth of the run)."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    power: float = Field(default=1.0, gt=0)
    """Exponent of the polynomial decay."""
    decay_from_start: bool = False
    """Count the decay from the first step, as published BERT recipes do: the rate falls where the warm-up ends."""
    warmup_start_step: int = Field(default=0, le=0)
    """Step from which the warm-up is counted: below 0, the first step is already some way up."""


class BatchRampSection(Section):
    """A batch that grows in equal steps over the first rows of a run, read in order (Smith et al. 2022, 3.2)."""

    start_rows: int = Field(gt=0)
    """Rows of the first step."""
    step_rows: int = Field(gt=0)
    """Rows that are added each time."""
    over_rows: int = Field(gt=0)
    """Rows of the run after which the batch is whole; each size is kept for an equal share of them."""


class TrainSection(Section):
    """How long, how much at a time, in which arithmetic."""

    steps: int = Field(gt=0)
    """Optimizer steps."""
    sequence_length: int = Field(gt=1)
    """Tokens in a row."""
    batch_rows: int | None = Field(default=None, gt=0)
    """Rows in one optimizer step (or give batch_tokens)."""
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens in one optimizer step (or give batch_rows)."""
    batch_ramp: BatchRampSection | None = None
    """Smaller batches at the start; the schedule then counts in whole batches, batch_rows rows each."""
    micro_batch_rows: int | None = Field(default=None, gt=0)
    """Rows that a process computes at once, accumulating the others; by default all, in a pipeline four turns of it."""
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of the model: bf16 and fp16 are 16-bit weights with fp32 masters, fp64 is for proofs; auto takes what
    the GPU is made for, and fp32 on a CPU.
    """
    matmul: Literal["same", "fp8", "fp8-emulated"] = "same"
    """Arithmetic of the blocks' matrix products: that of `precision`, or fp8 over bf16 weights (torchao, GPUs of
    compute capability 8.9 and later); fp8-emulated rounds alike on any device, slowly, to try a recipe.
    """
    recompute: Literal["none", "full", "selective"] = "none"
    """Activations recomputed in backward: none, every layer, or the attention core alone."""
    offload: bool = False
    """fp32 weights, optimizer state and update on the host; the device holds weights as the products take them."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile: auto uses it where a compiler answers and the run is long enough to pay."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPU when there is one."""
    deterministic: bool = False
    """On a GPU only kernels that repeat to the last bit, slower ones; a CPU's do with as many threads."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of initial weights, sample order, masks and dropout."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Bound on the global gradient norm; 0 = none."""
    z_loss: float = Field(default=0.0, ge=0)
    """GPT: weight of the square of the logits' log-sum-exp in the training loss, which keeps it near 0 (PaLM: 1e-4)."""
    stop_after_skipped: int = Field(default=10, gt=0)
    """Steps in a row with a non-finite loss or gradient (each is skipped and counted) after which the run stops."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 = only at the end."""
    eval_rows: int | None = Field(default=None, gt=0)
    """Rows of each evaluation inside the run, a sample of every store by its size; by default the whole validation
    split, which the last one always uses.
    """

    @property
    def rows_per_step(self) -> int:
        return self.batch_rows or (self.batch_tokens or 0) // self.sequence_length

    def rows_at(self, position: int) -> int:
        """Rows of the step that begins when `position` rows of the run have been read."""
        ramp, whole = self.batch_ramp, self.rows_per_step
        if ramp is None or position >= ramp.over_rows:
            return whole
        return ramp.start_rows + position * self._sizes(ramp) // ramp.over_rows * ramp.step_rows

    def rows_before(self, step: int) -> int:
        """Rows of the run that have been read when step `step` (from 0) begins."""
        ramp, position = self.batch_ramp, 0
        while ramp is not None and position < ramp.over_rows and step:
            size = position * self._sizes(ramp) // ramp.over_rows
            end = -(-(size + 1) * ramp.over_rows // self._sizes(ramp))  # where the next size begins
            rows = self.rows_at(position)
            steps = min(-(-(end - position) // rows), step)
            position, step = position + steps * rows, step - steps
        return position + step * self.rows_per_step

    def _sizes(self, ramp: BatchRampSection) -> int:
        return (self.rows_per_step - ramp.start_rows) // ramp.step_rows

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.rows_before(self.steps) * self.sequence_length

    @property
    def rows_per_micro_batch(self) -> int:
        return self.micro_batch_rows or self.rows_per_step


class ObjectiveSection(Section):
    """What a BERT is trained to predict."""

    sentences: Literal["nsp", "sop", "none"] = "nsp"
    """Pair task: next sentence, sentence order, or no pairs."""
    mask_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Share of tokens predicted: 80 % masked, 10 % replaced, 10 % left."""
    label_smoothing: Fraction = 0.0
    """Share of each masked token's label that is spread over the vocabulary; in the training loss alone."""
    whole_word: bool = False
    """Mask all pieces of a word together."""
    packing: bool = False
    """Several pairs in one row, kept apart in attention, instead of padding."""
    pair_copies: int = Field(default=1, gt=0)
    """Differently drawn passes over the text that make one epoch."""
    short_fraction: Fraction = 0.1
    """Share of documents whose pairs aim at a shorter length."""


class EvaluationSection(Section):
    """Benchmark tasks scored inside the run, as `throughline eval` scores its checkpoints."""

    tasks: list[str] = []
    """Tasks, groups or task files, as `throughline eval --tasks` takes them."""
    data_dir: str = ""
    """Directory that holds the tasks' files; "" = the shipped samples, else the `datasets` library."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between scorings, a multiple of train.eval_every_steps; 0 = only at the end."""
    limit: int | None = Field(default=200, gt=0)
    """Maximum number of records per task."""


class CheckpointSection(Section):
    """When the run is saved."""

    save_every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 = only at the end and when stopped."""
    keep: int = Field(default=2, ge=0)
    """Checkpoints kept, the newest; 0 = all."""


class ParallelSection(Section):
    """How the run is spread over processes: the product of the degrees is their number."""

    data: int = Field(default=1, gt=0)
    """Processes that each compute their part of the batch's rows."""
    tensor: int = Field(default=1, gt=0)
    """Processes that share each matrix, and the row between matrices."""
    pipeline: int = Field(default=1, gt=0)
    """Processes in a row, each with stages of consecutive layers."""
    context: int = Field(default=1, gt=0)
    """Processes that share each row in attention too."""
    expert: int = Field(default=1, gt=0)
    """Of the data processes so many neighbours share the experts of each layer: no factor of the number of all."""
    sharding: Sharding = "replicated"
    """What the data processes share out: nothing, optimizer states, those and gradients, or those and weights."""
    replicas: int = Field(default=1, gt=0)
    """Hybrid sharding: groups of data processes that each hold a whole copy."""
    schedule: Schedule = "1f1b"
    """Order of the micro-batches in a pipeline."""
    stages_per_process: int = Field(default=1, gt=0)
    """Pipeline stages on each process: 2 or more for interleaved schedules, 2 for zero-bubble-v."""
    layers_per_stage: list[int] = []
    """Layers of each stage; by default as even as possible."""
    timeout_seconds: int = Field(default=600, ge=10)
    """Wait of a process for the others, in any collective, before the run counts as stalled and starts again."""

    def layout(self) -> Layout:
        fields = self.model_dump(exclude={"timeout_seconds"})
        return Layout(**fields | {"layers_per_stage": tuple(self.layers_per_stage)})


class CompressionSection(Section):
    """Gradients of data processes over a slow network: fewer bytes, and what was lost is sent later."""

    scheme: Literal["none", "bf16", "powersgd", "one-bit-adam"] = "none"
    """Half the bytes; thin factors of matrices; or, after a warm-up, signs of the momentum (1/32, variance frozen)."""
    rank: int = Field(default=4, gt=0)
    """Columns of PowerSGD's factors."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps with whole gradients at the start; by default 10 for PowerSGD and 15 % of the run for 1-bit Adam."""

    def warmup(self, steps: int) -> int:
        usual = steps * 15 // 100 if self.scheme == "one-bit-adam" else 10
        return usual if self.warmup_steps is None else self.warmup_steps


class TargetSection(Section):
    """Where a run may end before its last step."""

    figure: Literal["mlm_accuracy", "mlm_loss", "nsp_accuracy", "loss"]
    """Figure of the validation split; an evaluation every train.eval_every_steps looks at it."""
    value: float
    """Accuracy to reach, or loss to fall to."""


class LogSection(Section):
    """What is written down; metrics.jsonl is always written."""

    every_steps: int = Field(default=1, gt=0)
    """Steps between records in metrics.jsonl."""
    sinks: list[Literal["tensorboard", "wandb"]] = []
    """Dashboards that receive the same records."""


class Recipe(Section):
    """Everything that decides a training run."""

    version: Literal[1] = 1
    """Version of the recipe format."""
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    objective: ObjectiveSection | None = None
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    parallel: ParallelSection = ParallelSection()
    compression: CompressionSection = CompressionSection()
    target: TargetSection | None = None
    log: LogSection = LogSection()

    @property
    def mask_fraction(self) -> float:
        """Share of the tokens that a BERT predicts; 0 for a GPT."""
        return self.objective.mask_fraction if self.objective else 0.0
