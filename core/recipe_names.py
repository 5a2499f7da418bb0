"""The names that Megatron-LM, torchtitan, Hugging Face's Trainer and nanoGPT give to fields of a recipe: for hints."""

from collections.abc import Iterable

# our setting -> their names of it, in lower case without dashes and underscores
THEIRS = {
    "parallel.tensor": "tp tpsize tensorparallel tensorparallelsize tensormodelparallelsize tensorparalleldegree",
    "parallel.data": "dp dpsize dataparallel dataparallelsize dataparallelreplicatedegree ddp worldsize ngpus gpus",
    "parallel.pipeline": "pp ppsize pipelineparallel pipelineparallelsize pipelinemodelparallelsize "
    "pipelineparalleldegree",
    "parallel.context": "cp cpsize contextparallel contextparallelsize contextparalleldegree sequenceparallel",
    "parallel.expert": "ep epsize expertparallel expertmodelparallelsize expertparalleldegree",
    'parallel.sharding = "full"': "fsdp fsdp2 fullshard fullyshard zero3 shardingstrategy dataparallelsharddegree",
    'parallel.sharding = "zero1"': "zero1 usedistributedoptimizer distributedoptimizer zero zerostage",
    'parallel.sharding = "zero2"': "zero2",
    "optimizer.learning_rate": "lr maxlr peaklr rate",
    "optimizer.weight_decay": "wd",
    "optimizer.beta1": "adambeta1 betas",
    "optimizer.beta2": "adambeta2",
    "optimizer.epsilon": "eps adameps adamepsilon",
    "optimizer.name": "optim optimizertype",
    "schedule.kind": "scheduler lrscheduler lrschedulertype lrdecaystyle lrschedule",
    "schedule.warmup_steps": "warmup warmupiters lrwarmupiters numwarmupsteps lrwarmupsteps",
    "schedule.decay_steps": "lrdecayiters lrdecaysteps decay",
    "schedule.final_fraction": "minlr minlrratio finallr",
    "train.steps": "maxsteps maxiters trainiters numsteps iterations iters epochs numepochs numtrainepochs",
    "train.batch_rows": "batchsize globalbatchsize gbs bs trainbatchsize",
    "train.batch_tokens": "totalbatchsize tokensperbatch",
    "train.micro_batch_rows": "microbatchsize mbs perdevicetrainbatchsize devicebatchsize localbatchsize "
    "gradientaccumulationsteps gradaccum gradientaccumulation accumulategradbatches",
    "train.sequence_length": "seqlen seqlength maxseqlen maxseqlength maxmodellen maxlength blocksize contextlength "
    "nctx npositions maxpositionembeddings ctx",
    "train.precision": "dtype bf16 fp16 mixedprecision amp halfprecision torchdtype",
    "train.recompute": "gradientcheckpointing activationcheckpointing activationcheckpoint recomputegranularity",
    "train.offload": "cpuoffload offloadoptimizer",
    "train.compile": "torchcompile",
    "train.clip_norm": "gradclip clipgrad maxgradnorm gradientclipping gradnormclip",
    "train.eval_every_steps": "evalinterval evalsteps evalevery valinterval evaluationinterval",
    "train.eval_rows": "evaliters evalbatches",
    "checkpoint.save_every_steps": "saveinterval savesteps saveevery checkpointinterval ckptinterval",
    "checkpoint.keep": "savetotallimit keeplast keeplastn",
    "log.every_steps": "loginterval loggingsteps logfreq logevery",
    'log.sinks = ["wandb"]': "wandb wandbproject usewandb reportto wandblog",
    'log.sinks = ["tensorboard"]': "tensorboard tensorboarddir tb",
    "data.train": "dataset datapath traindata traindatapath datadir trainfile path",
    "data.field": "textcolumn textfield textkey jsonkeys column",
    "data.validation_fraction": "valsplit validationsplit valfraction",
    "data.tokenizer": "tokenizermodel tokenizername tokenizerpath vocabfile",
    "objective.mask_fraction": "mlmprobability maskprob masklmprob",
    "model.init_from": "modelnameorpath pretrained pretrainedcheckpoint load initfrom finetunefrom",
    "model.overrides.layers": "nlayer nlayers numlayers numhiddenlayers depth",
    "model.overrides.heads": "nhead nheads numheads numattentionheads",
    "model.overrides.kv_heads": "nkvheads numkeyvaluegroups numkeyvalueheads numquerygroups",
    "model.overrides.width": "nembd dmodel dim hidden hiddensize embeddim modeldim",
    "model.overrides.mlp_width": "ffnhiddensize intermediatesize dff ffndim",
    "model.overrides.dropout": "hiddendropout attentiondropout hiddendropoutprob dropoutrate",
    "model.overrides.vocab_size": "vocab vocabsize paddedvocabsize",
}
OURS = {name: setting for setting, names in THEIRS.items() for name in names.split()}


def familiar(name: str, known: Iterable[str]) -> str:
    """Our setting for a name that another program gives it, where a recipe with these keys has it; else ""."""
    setting = OURS.get(name.lower().replace("-", "").replace("_", ""), "")
    key = setting.split(" = ")[0]
    has_it = key in known or (key.startswith("model.overrides.") and "model.overrides" in known)
    return setting if has_it else ""
