"""B1: a training step captured as CUDA graphs, beside launched, plain torch compiled and transformers compiled.
python b1_train.py [--warm] gpt|bert piece...   pieces: eager blocks whole plain tf bits"""
import os, statistics, sys, time
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
from kit import emit, step, need
import torch
import gpu
from gpu_scale import flops_per_token, made_rows, peak_flops, draw, MASKED
from throughline.models.config import family_of
from throughline.planner.layout import Layout
from throughline.train import parallelize
from throughline.train.engine import Engine
from throughline.train.objective import prepare
from throughline.train.parallel.mesh import Mesh
from throughline.train.step import LossScaler, Trainer, train_step
P = "b1"
SMALL = bool(os.environ.get("KIT_SMALL"))
device = torch.device("cuda", 0)
sync = torch.cuda.synchronize
warm = "--warm" in sys.argv
words = [w for w in sys.argv[1:] if not w.startswith("-")]
kind, pieces = words[0], words[1:]
config, rows, length = gpu.shape_of({"gpt": "gpt2-124m", "bert": "bert-base"}[kind], device)
if SMALL: import dataclasses; config = dataclasses.replace(config, layers=2); rows = 2
tokens = rows * length
per_token, peak = flops_per_token(config, length), peak_flops(device)

def trainer_of(compiling, capturable=False, layers=None, seed=0):
    import dataclasses
    shape = dataclasses.replace(config, layers=layers) if layers else config
    engine = Engine(shape, Mesh(Layout(), device), "bf16", compiling="on" if compiling == "blocks" else "off")
    if compiling == "whole":
        stage = engine.stages[0]
        def plain(batch): return stage.head(stage.model, stage.encode(torch.empty(0), batch), batch, stage.mesh.tensor)
        compiled = parallelize._compiled(plain, "on", stage.model.parameters)
        def forward(x):
            batch = stage.micro_batches[stage.at]; stage.at += 1
            sums = compiled(batch); stage.sums.append(sums.detach())
            return (sums * stage.inverse_counts).sum()
        stage.forward = forward
    torch.manual_seed(seed)
    draw([local.value for local in engine.local_shards]); engine.publish()
    optimizer = torch.optim.AdamW([{"params": [v for _, v in engine.named_parameters()], "base_lr": 1e-4}], lr=1e-4, fused=True, capturable=capturable)
    trainer = Trainer(engine, optimizer, LossScaler.of("bf16"), "bf16", 1.0)
    return engine, trainer

def batch_of(which=0):
    made = made_rows(config, rows, length)
    if which: made = {n: (v if v.ndim == 1 else v[::-1].copy()) for n, v in made.items()}
    return prepare(made, family_of(config), rows, device, MASKED)

class Captured:
    """One graph of a micro-batch, one of the end of a step."""
    def __init__(self, engine, trainer, batch):
        self.engine, self.trainer = engine, trainer
        self.stage = engine.stages[0]
        self.place = {n: v.clone() for n, v in batch.micro_batches[0].items()}
        self.inverse = engine._inverse(batch.counts_there.clone())
        self.lr = torch.tensor(1e-4, device=device)
        for group in trainer.optimizer.param_groups: group["lr"] = self.lr
        self.pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
        began = time.perf_counter()
        with torch.cuda.stream(side):
            self.micro()
            for buffer in engine.buffers: buffer.zero()
        torch.cuda.current_stream().wait_stream(side); sync()
        self.warm_s = time.perf_counter() - began; began = time.perf_counter()
        self.first = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.first, pool=self.pool, stream=side, capture_error_mode="thread_local"): self.micro()
        self.capture_s = time.perf_counter() - began; began = time.perf_counter()
        self.pinned = None
        self.last = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.last, pool=self.pool, stream=side, capture_error_mode="thread_local"): self.end()
        self.end_capture_s = time.perf_counter() - began
        self.pinned = torch.empty_like(self.figures, device="cpu", pin_memory=True)
    def micro(self):
        self.stage.load([self.place], self.inverse, 1.0)
        loss = self.stage(torch.empty(0)); loss.backward()
        self.sums = self.stage.sums[-1]
    def end(self):
        engine, trainer = self.engine, self.trainer
        self.stage.sums = [self.sums]
        engine.finish_gradients()
        self.figures = engine._totals(self.inverse, 0, None)
        norm = self.figures[-2]
        factor = torch.where(norm > 1.0, 1.0 / (norm + 1e-6), 1.0)
        engine.update(trainer.optimizer, factor, self.figures[:-1].isfinite().all())
    def __call__(self, batch, end=True):
        for n, v in batch.micro_batches[0].items(): self.place[n].copy_(v)
        self.inverse.copy_(self.engine._inverse(batch.counts_there))
        self.first.replay()
        if end == "launched":
            self.stage.sums = [self.sums]; self.end()
        else: self.last.replay()
        self.pinned.copy_(self.figures, non_blocking=True)
        torch.cuda.current_stream().record_event().synchronize()
        return self.pinned.clone()

def measure(name, work, first=None, **more):
    taken = []
    for _ in range(3): work()
    sync()
    for _ in range(2 if SMALL else 12):
        t = time.perf_counter(); work(); sync(); taken.append(time.perf_counter() - t)
    # pipelined: several steps before a wait
    t = time.perf_counter(); n = 2 if SMALL else 20
    for _ in range(n): work()
    sync(); back = (time.perf_counter() - t) / n
    speed = tokens / statistics.median(taken)
    emit(P, model=kind, shape=f"{rows} x {length}", side=name, tokens_per_s=round(speed), back_to_back=round(tokens / back), ms=round(1e3 * statistics.median(taken), 3), spread_ms=[round(1e3 * min(taken), 3), round(1e3 * max(taken), 3)],
         mfu=peak and round(per_token * speed / peak, 3), gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), first_s=first and round(first, 2), **more)
    return speed

def ours(how):
    began = time.perf_counter()
    engine, trainer = trainer_of(how, capturable=True)
    batch = batch_of()
    check = lambda: gpu.check(train_step(trainer, batch, 1.0).skipped) if hasattr(gpu, "check") else train_step(trainer, batch, 1.0)
    check(); sync(); first = time.perf_counter() - began
    if warm: return
    torch.cuda.reset_peak_memory_stats()
    measure(f"ours {how}, launched", check, first)
    if how == "eager" or True:
        # the lower floor of kernels: foreach adds of 16-bit gradients are not built here
        graph = Captured(engine, trainer, batch)
        measure(f"ours {how}, micro-batch captured", lambda: graph(batch, end="launched"), capture_s=round(graph.capture_s, 3), warm_s=round(graph.warm_s, 3))
        measure(f"ours {how}, micro-batch and end captured", lambda: graph(batch), end_capture_s=round(graph.end_capture_s, 3))
        began = time.perf_counter()
        host = []
        for _ in range(10):
            sync(); t = time.perf_counter(); graph.first.replay(); host.append(time.perf_counter() - t); sync()
        emit(P, model=kind, side=f"ours {how}", host_ms_of_a_replay=round(1e3 * statistics.median(host), 3))
        again = time.perf_counter(); g = torch.cuda.CUDAGraph(); side = torch.cuda.Stream()
        with torch.cuda.graph(g, pool=graph.pool, stream=side, capture_error_mode="thread_local"): graph.micro()
        emit(P, model=kind, side=f"ours {how}", second_capture_s=round(time.perf_counter() - again, 3))

def bits():
    """Losses, norms and weights of the captured step against the launched one, deterministic kernels, 4 layers; and launched against launched."""
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
        results = {}
        batches = [batch_of(0), batch_of(1)]
        for name in ("launched", "launched again", "captured"):
            engine, trainer = trainer_of("eager", capturable=True, layers=4)
            lines = []
            for i in range(2):
                r = train_step(trainer, batches[i % 2], 1.0); lines.append((r.loss, r.grad_norm))
            graph = Captured(engine, trainer, batches[0]) if name == "captured" else None
            for i in range(6):
                if graph is None: r = train_step(trainer, batches[i % 2], 1.0); lines.append((r.loss, r.grad_norm))
                else:
                    *terms, norm, _ = graph(batches[i % 2]).tolist(); lines.append((sum(terms), norm))
            results[name] = lines, torch.cat([v.detach().flatten() for _, v in engine.named_parameters()]).cpu()
            del engine, trainer, graph
        a = results["launched"]
        for name in ("launched again", "captured"):
            b = results[name]
            diff = [max(abs(x - y) / max(abs(x), 1e-9) for x, y in zip(p, q)) for p, q in zip(a[0], b[0])]
            emit(P, model=kind, bits=name, deterministic=deterministic, losses_equal=a[0] == b[0], largest_relative_of_loss_and_norm=max(diff), by_step=[f"{d:.1e}" for d in diff], weights_equal=bool(torch.equal(a[1], b[1])), largest_weight=float((a[1] - b[1]).abs().max()), losses=[round(l, 5) for l, _ in a[0]])
    torch.use_deterministic_algorithms(False)

emit(P, card=torch.cuda.get_device_name(0), torch=torch.__version__, kind=kind, pieces=pieces, warm=warm)
for piece in pieces:
    with step(P, f"{kind} {piece}"):
        need(8)
        if piece in ("eager", "blocks", "whole"): ours(piece)
        elif piece == "bits": bits()
        else:
            began = time.perf_counter()
            work = gpu.PEERS[{"tf": "transformers", "plain": "plain"}[piece]](config, made_rows(config, rows, length), device, True)
            work(); sync(); first = time.perf_counter() - began
            if not warm: torch.cuda.reset_peak_memory_stats(); measure({"tf": "transformers compiled", "plain": "plain torch compiled"}[piece], work, first)
    import gc; gc.collect(); torch.cuda.empty_cache(); torch._dynamo.reset()
