"""B2: BERT-Base fp16, texts of about 73 tokens: one packed line and a dozen captured graphs, against buckets, against the
encoder as it is. All from ids in process. python b2_encoder.py"""
import os, statistics, sys, time
from kit import emit, step, need
import numpy as np, torch
from throughline.inference.runtimes.torch_backend import TorchEncoder
from throughline.models.config import preset
from throughline.models.init import build
P = "b2"
SMALL = bool(os.environ.get("KIT_SMALL"))
device = torch.device("cuda", 0)
sync = torch.cuda.synchronize
config = preset("bert-base", **({"layers": 2} if SMALL else {}))
model = build(config, 0).to(device, torch.float16).eval()
draw = np.random.default_rng(0)
count = 200 if SMALL else 6000
lengths = np.clip(draw.integers(18, 129, count), 2, 512)
texts = [draw.integers(5, config.vocab_size, n) for n in lengths]
SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
LONGEST = 512

class Packed:
    """One line of tokens for each size; rows = max(8, tokens / 16)."""
    def __init__(self, hidden=None):
        self.hidden = hidden or model.hidden
        self.pool, self.graphs, self.seconds = torch.cuda.graph_pool_handle(), {}, {}
        with torch.inference_mode():
            for size in reversed(SIZES):
                began = time.perf_counter(); self.graphs[size] = self.capture(size); self.seconds[size] = round(time.perf_counter() - began, 4)
    def capture(self, size):
        rows = max(8, size // 16); bounds = rows + size // LONGEST + 1
        whole = torch.zeros(4 * size + bounds + 1, dtype=torch.int32, device=device)
        pinned = torch.zeros(whole.shape, dtype=torch.int32, pin_memory=True)
        ids, types, positions, row, ends = whole.split([size] * 4 + [bounds + 1])
        ends[1:] = torch.linspace(0, size, bounds).int()  # a valid layout while it is captured
        out = torch.empty((rows, config.width), dtype=torch.float32, device=device)
        back = torch.empty(out.shape, dtype=torch.float32, pin_memory=True)
        numbers = torch.arange(rows, device=device, dtype=torch.int32)
        def run():
            hidden = self.hidden(ids.long()[None], types.long()[None], None, positions.long()[None], None, ends)[0]
            member = (row[None] == numbers[:, None])
            counts = member.sum(1, keepdim=True).clamp(min=1)
            out.copy_((member.to(hidden.dtype) @ hidden).float() / counts)
        side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side): run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local"): run()
        return graph, whole, pinned, out, back, rows, bounds, (size, numbers, ends)  # what a graph reads is kept
    def launch(self, batch):
        total = sum(map(len, batch))
        size = next(s for s in SIZES if s >= total and max(8, s // 16) >= len(batch))
        graph, whole, pinned, out, back, rows, bounds, _ = self.graphs[size]
        host = pinned.numpy()
        at, ends = 0, host[4 * size:]
        host[: 4 * size] = 0; host[3 * size : 4 * size] = -1; ends[:] = 0
        for i, ids in enumerate(batch):
            n = len(ids)
            host[at : at + n] = ids; host[2 * size + at : 2 * size + at + n] = np.arange(n); host[3 * size + at : 3 * size + at + n] = i
            at += n; ends[i + 1] = at
        last = len(batch)
        while at < size: at = min(size, at + LONGEST); last += 1; ends[last] = at
        ends[last + 1 :] = size
        with torch.inference_mode(): whole.copy_(pinned, non_blocking=True); graph.replay(); back.copy_(out, non_blocking=True)
        return back, len(batch), size
    def __call__(self, batch):
        back, n, _ = self.launch(batch); torch.cuda.current_stream().synchronize(); return back[:n].numpy().copy()

def take(queue, most_tokens=4096, most_rows=128):
    batch, total = [], 0
    while queue and len(batch) < most_rows and total + len(queue[0]) <= most_tokens: total += len(queue[0]); batch.append(queue.pop(0))
    return batch

class Buckets:
    """Lengths to 32, rows to steps; captured on first sight."""
    ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    def __init__(self): self.pool, self.graphs, self.captures = torch.cuda.graph_pool_handle(), {}, 0
    def __call__(self, batch):
        length, rows = -(-max(map(len, batch)) // 32) * 32, next(r for r in self.ROWS if r >= len(batch))
        if (rows, length) not in self.graphs:
            self.captures += 1
            ids = torch.zeros((2, rows, length), dtype=torch.int64, device=device); out = torch.empty((rows, config.width), device=device)
            ids[1] = 1
            def run():
                hidden = model.hidden(ids[0], torch.zeros_like(ids[0]), ids[1].bool()); real = ids[1][..., None].to(hidden.dtype)
                out.copy_((hidden * real).sum(1) / real.sum(1).clamp(min=1))
            side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
            with torch.inference_mode():
                with torch.cuda.stream(side): run()
                torch.cuda.current_stream().wait_stream(side); graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local"): run()
            self.graphs[rows, length] = graph, ids, out, torch.zeros(ids.shape, dtype=torch.int64, pin_memory=True)
        graph, ids, out, pinned = self.graphs[rows, length]
        host = pinned.numpy(); host[:] = 0; host[1, :, 0] = 1
        for i, one in enumerate(batch): host[0, i, : len(one)] = one; host[1, i, : len(one)] = 1
        
        with torch.inference_mode(): ids.copy_(pinned, non_blocking=True); graph.replay()
        return out[: len(batch)].cpu().numpy()

def padded(encoder, batch):
    length = max(map(len, batch)); ids = np.zeros((len(batch), length), np.int64); mask = np.zeros(ids.shape, bool)
    for i, one in enumerate(batch): ids[i, : len(one)] = one; mask[i, : len(one)] = True
    return encoder.forward(ids, np.zeros_like(ids), mask, np.zeros((len(batch), 0), np.int64), {"sentence_embedding"})["sentence_embedding"]

def rate(call, depth, order=None, sort=False):
    queue, batches = list(texts), []
    while queue:
        window = [queue.pop(0) for _ in range(min(depth, len(queue)))]
        if sort: window.sort(key=len)
        while window: batches.append(take(window) if order is None else [window.pop(0) for _ in range(min(order, len(window)))])
    sync(); t = time.perf_counter()
    for batch in batches: call(batch)
    sync(); return count / (time.perf_counter() - t), len(batches)

def single(call, repeats):
    taken = []
    for ids in texts[:repeats]:
        t = time.perf_counter(); call([ids]); taken.append(1e3 * (time.perf_counter() - t))
    taken.sort(); return {"p50_ms": round(statistics.median(taken), 3), "p99_ms": round(taken[int(0.99 * (len(taken) - 1))], 3), "max_ms": round(taken[-1], 2)}

emit(P, card=torch.cuda.get_device_name(0), torch=torch.__version__, texts=count, mean_tokens=round(float(lengths.mean()), 1))
with step(P, "packed"):
    began = time.perf_counter(); packed = Packed()
    emit(P, side="packed", graphs=len(packed.graphs), made_in_s=round(time.perf_counter() - began, 2), of_a_graph_s=packed.seconds, gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))
    encoder = TorchEncoder(model)
    with torch.inference_mode():
        a, b = packed(texts[:40]), padded(encoder, texts[:40])
        emit(P, check="packed against padded, fp16", largest=float(np.abs(a - b).max()), scale=float(np.abs(b).max()))
    for turn in ("first", "second"):
        for depth in (6, 64, 256):
            speed, calls = rate(packed, depth)
            emit(P, side="packed", turn=turn, depth=depth, texts_per_s=round(speed), calls=calls)
        emit(P, side="packed", turn=turn, one_client=single(packed, 50 if SMALL else 600))
    # the device alone, by size
    found = {}
    for size, (graph, *_r) in packed.graphs.items():
        e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; graph.replay(); e[0].record()
        for _ in range(20): graph.replay()
        e[1].record(); sync(); found[size] = round(e[0].elapsed_time(e[1]) / 20, 4)
    emit(P, side="packed", device_ms_of_a_replay=found, texts_per_s_at_4096=round(4096 / lengths.mean() / found[4096] * 1e3))
    # two lines in turn: the host fills one while the other runs
    queue, batches = list(texts), []
    while queue: batches.append(take(queue))
    sync(); t = time.perf_counter(); events = []
    for batch in batches:
        size = packed.launch(batch)[2]; events.append(torch.cuda.current_stream().record_event())
        if len(events) > 1: events.pop(0).synchronize()
    sync(); emit(P, side="packed, answers read behind (races ignored)", texts_per_s=round(count / (time.perf_counter() - t)))
with step(P, "buckets"):
    buckets = Buckets()
    for turn in ("first", "second"):
        for depth in (6, 64, 256):
            before = buckets.captures; speed, calls = rate(buckets, depth, 64); emit(P, side="buckets, in the queue's order", turn=turn, depth=depth, texts_per_s=round(speed), calls=calls, captures=buckets.captures - before)
        before = buckets.captures; speed, calls = rate(buckets, 256, 32, True); emit(P, side="buckets, sorted by length, 32 rows", turn=turn, depth=256, texts_per_s=round(speed), calls=calls, captures=buckets.captures - before)
        emit(P, side="buckets", turn=turn, one_client=single(buckets, 50 if SMALL else 600))
with step(P, "as it is"):
    encoder = TorchEncoder(model)
    for turn in ("first", "second"):
        for depth in (6, 64):
            need(15); speed, calls = rate(lambda b: padded(encoder, b), depth, 64); emit(P, side="TorchEncoder", turn=turn, depth=depth, texts_per_s=round(speed), calls=calls, shapes=len(encoder._calls))
    for turn in ("first", "second"): emit(P, side="TorchEncoder", turn=turn, one_client=single(lambda b: padded(encoder, b), 50 if SMALL else 600))
with step(P, "packed, compiled"):
    need(40)
    hidden = torch.compile(model.hidden, dynamic=False)
    torch._dynamo.config.recompile_limit = 64
    SIZES = (256, 1024, 4096); began = time.perf_counter(); fast = Packed(hidden)
    found = {}
    for size, (graph, *_r) in fast.graphs.items():
        e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; graph.replay(); e[0].record()
        for _ in range(20): graph.replay()
        e[1].record(); sync(); found[size] = round(e[0].elapsed_time(e[1]) / 20, 4)
    emit(P, side="packed, compiled", device_ms_of_a_replay=found, compiled_in_s=round(time.perf_counter() - began, 1))
