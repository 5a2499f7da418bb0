"""A: which operator of a GPT's ONNX graph is wrong on CUDA. python a_onnx.py ops|models|path   (KIT_CPU=1: both sides on the CPU)"""
import os, sys, tempfile
from pathlib import Path
import numpy as np
from kit import emit, step, need
import onnxruntime as ort
import onnx
from onnx import TensorProto as T, helper as h
what = sys.argv[1]
tag = sys.argv[2] if len(sys.argv) > 2 else ""
CPU = bool(os.environ.get("KIT_CPU"))
P = "a-" + what
CUDA = ["CPUExecutionProvider"] if CPU else [("CUDAExecutionProvider", {"use_tf32": "0"})]
rng = np.random.default_rng(0)

def session(model, providers, level=3):
    o = ort.SessionOptions(); o.log_severity_level = level
    o.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    data = model if isinstance(model, (str, bytes)) else model.SerializeToString()
    return ort.InferenceSession(data, o, providers=providers)

def on_cpu_nodes(s):
    try:
        return sorted({n.op_type for g in s.get_provider_graph_assignment_info() if g.ep_name == "CPUExecutionProvider" for n in g.get_nodes()})
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:100]

def off(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape: return f"shapes {a.shape} {b.shape}"
    if not a.size: return 0.0
    if not np.isfinite(a).all(): return "not finite"
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9))

def graph(nodes, inputs, outputs, opset=24, weights=()):
    v = lambda name, kind, shape: h.make_tensor_value_info(name, kind, shape)
    g = h.make_graph(nodes, "g", [v(*i) for i in inputs], [v(*o) for o in outputs], list(weights))
    m = h.make_model(g, opset_imports=[h.make_opsetid("", opset), h.make_opsetid("com.microsoft", 1)], ir_version=11)
    return m

def attention_ref(q, k, v, totals, scale=None):
    """float64; bottom-right causal by totals"""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    B, A, S, D = q.shape; G = k.shape[1]
    k, v = (np.repeat(x, A // G, 1) for x in (k, v))
    out = np.zeros_like(q)
    for b in range(B):
        for i in range(S):
            n = totals[b] - S + i + 1
            if n <= 0: continue
            s = np.einsum("ad,atd->at", q[b, :, i], k[b, :, :n]) * D ** -0.5
            p = np.exp(s - s.max(-1, keepdims=True)); p /= p.sum(-1, keepdims=True)
            out[b, :, i] = np.einsum("at,atd->ad", p, v[b, :, :n])
    return out

def ops():
    kinds = {"fp32": (T.FLOAT, np.float32, 1e-5), "fp16": (T.FLOAT16, np.float16, 5e-3)}
    for name, (kind, dt, bound) in kinds.items():
        # TensorScatter, separate and in place
        for B, at, S in ((1, [5], 3), (1, [40], 24), (2, [5, 0], 3), (2, [7, 90], 1)):
            with step(P, f"scatter {name} {B} {at} {S}"):
                m = graph([h.make_node("TensorScatter", ["past", "new", "at"], ["present"], axis=-2)],
                          [("past", kind, ["b", 4, "c", 32]), ("new", kind, ["b", 4, "s", 32]), ("at", T.INT64, ["b"])], [("present", kind, ["b", 4, "c", 32])])
                past, new = rng.normal(size=(B, 4, 128, 32)).astype(dt), rng.normal(size=(B, 4, S, 32)).astype(dt)
                want = past.copy()
                for b in range(B): want[b, :, at[b]:at[b] + S] = new[b]
                s = session(m, CUDA)
                found = s.run(None, {"past": past, "new": new, "at": np.array(at)})[0]
                line = {"separate": off(found, want)}
                if not CPU:
                    import torch
                    tp, tn, ta = torch.from_numpy(past).cuda(), torch.from_numpy(new).cuda(), torch.tensor(at).cuda()
                    bind = s.io_binding()
                    for n_, t_, e_ in (("past", tp, dt), ("new", tn, dt), ("at", ta, np.int64)): bind.bind_input(n_, "cuda", 0, e_, tuple(t_.shape), t_.data_ptr())
                    bind.bind_output("present", "cuda", 0, dt, tuple(tp.shape), tp.data_ptr())
                    torch.cuda.synchronize(); s.run_with_iobinding(bind)
                    line["in_place"] = off(tp.cpu().numpy(), want)
                emit(P, op="TensorScatter", kind=name, rows=B, at=at, new=S, cpu_nodes=on_cpu_nodes(s), **line)
        # Attention
        for heads, groups, D in ((4, 4, 32), (12, 12, 64), (4, 2, 32), (8, 2, 64)):
            for B, totals, S, cap in ((1, [40], 40, 128), (1, [7], 7, 128), (1, [64], 24, 128), (1, [8], 1, 128), (1, [128], 1, 128), (2, [8, 65], 1, 128), (2, [12, 35], 5, 128), (2, [40, 40], 40, 128), (1, [40], 40, 40), (1, [200], 60, 256)):
                with step(P, f"attention {name} {heads}/{groups} {totals} {S}"):
                    q = rng.normal(size=(B, heads, S, D)).astype(dt)
                    k, v = (rng.normal(size=(B, groups, cap, D)).astype(dt) for _ in range(2))
                    want = attention_ref(q, k, v, totals)
                    io = [("q", kind, ["b", heads, "s", D]), ("k", kind, ["b", groups, "c", D]), ("v", kind, ["b", groups, "c", D])]
                    line = {}
                    extra = {"softmax_precision": 1} if name == "fp16" else {}
                    # nonpad + causal; the same in 3D; mask; nonpad with mask, without causal
                    place = np.arange(cap); last = np.array(totals)[:, None] - S + np.arange(S)
                    hidden = np.where(place <= last[..., None], 0, -30000.0).astype(dt)[:, None]
                    feeds = {"q": q, "k": k, "v": v}
                    three = lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)
                    forms = {
                        "nonpad causal": ([h.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], is_causal=1, **extra)], io + [("n", T.INT64, ["b"])], feeds | {"n": np.array(totals)}),
                        "mask": ([h.make_node("Attention", ["q", "k", "v", "m"], ["y"], **extra)], io + [("m", kind, ["b", 1, "s", "c"])], feeds | {"m": hidden}),
                        "mask bool": ([h.make_node("Attention", ["q", "k", "v", "m"], ["y"], **extra)], io + [("m", T.BOOL, ["b", 1, "s", "c"])], feeds | {"m": hidden == 0}),
                        "nonpad mask": ([h.make_node("Attention", ["q", "k", "v", "m", "", "", "n"], ["y"], **extra)], io + [("m", kind, ["b", 1, "s", "c"]), ("n", T.INT64, ["b"])], feeds | {"m": hidden, "n": np.array(totals)}),
                        "nonpad causal 3d": ([h.make_node("Attention", ["q", "k", "v", "", "", "", "n"], ["y"], is_causal=1, q_num_heads=heads, kv_num_heads=groups, **extra)],
                                  [("q", kind, ["b", "s", heads * D]), ("k", kind, ["b", "c", groups * D]), ("v", kind, ["b", "c", groups * D]), ("n", T.INT64, ["b"])],
                                  {"q": three(q), "k": three(k), "v": three(v), "n": np.array(totals)}),
                    }
                    where = {}
                    for form, (nodes, ins, given) in forms.items():
                        try:
                            out = ["b", heads, "s", D] if "3d" not in form else ["b", "s", heads * D]
                            s = session(graph(nodes, ins, [("y", kind, out)]), CUDA)
                            found = s.run(None, given)[0]
                            line[form] = off(found, three(want) if "3d" in form else want)
                            where[form] = on_cpu_nodes(s)
                        except Exception as e:
                            line[form] = f"{type(e).__name__}: {e}"[:160]
                    emit(P, op="Attention", tag=tag, kind=name, heads=heads, groups=groups, D=D, totals=totals, S=S, cap=cap, cpu_nodes={f: n for f, n in where.items() if n}, bound=bound, **line)
    # rotary
    for name, (kind, dt, bound) in kinds.items():
        for B, S, start in ((1, 24, [40]), (2, 1, [7, 40]), (1, 1, [0])):
            with step(P, f"rotary {name} {B} {S}"):
                x = rng.normal(size=(B, 4, S, 32)).astype(dt); pos = np.array(start)[:, None] + np.arange(S)
                angle = np.arange(128)[:, None] / 10000 ** (np.arange(16) / 16)
                cos, sin = np.cos(angle).astype(dt), np.sin(angle).astype(dt)
                m = graph([h.make_node("RotaryEmbedding", ["x", "cos", "sin", "p"], ["y"])], [("x", kind, ["b", 4, "s", 32]), ("cos", kind, [128, 16]), ("sin", kind, [128, 16]), ("p", T.INT64, ["b", "s"])], [("y", kind, ["b", 4, "s", 32])])
                f = {"x": x, "cos": cos, "sin": sin, "p": pos}
                a, c, y = x[..., :16].astype(float), x[..., 16:].astype(float), None
                C, Sn = cos[pos][:, None].astype(float), sin[pos][:, None].astype(float)
                want = np.concatenate([a * C - c * Sn, c * C + a * Sn], -1)
                s = session(m, CUDA)
                emit(P, op="RotaryEmbedding-23", kind=name, rows=B, S=S, error=off(s.run(None, f)[0], want), cpu_nodes=on_cpu_nodes(s))

def models():
    import torch
    from throughline.core.backend import BackendOptions, Span
    from throughline.inference.exports.export import write_graph
    from throughline.inference.graphs import onnx_gpt
    from throughline.inference.graphs.graph_options import GraphOptions
    from throughline.inference.runtimes.backends import run_graph
    from throughline.inference.runtimes.torch_backend import TorchCausal
    from throughline.models.config import GPTConfig
    from throughline.models.init import build
    base = {"vocab_size": 512, "sequence_length": 128, "layers": 4, "width": 128, "heads": 4, "tied": False}
    shapes = {"learned": {}, "rotary": {"positions": "rotary"}, "grouped": {"positions": "rotary", "kv_heads": 2}, "window": {"positions": "rotary", "kv_heads": 2, "attention_window": 16}}
    init = onnx_gpt._Slots.__init__
    attend = onnx_gpt._Slots.attend
    def parts_init(self, parts, ids): init(self, parts, ids); self._standard = False
    def mask_attend(self, layer, query, key, value):
        graph, window = self.parts.graph, self.parts.window(layer)
        how = self.parts.scores | ({"softmax_precision": 1} if graph.half else {})
        if window not in self._hidden:
            places = graph.steps(graph.length("past.0.key", 2))
            last = graph.node("Unsqueeze", self.positions, graph.ints(1, 3))
            self._hidden[window] = onnx_gpt._hidden(self.parts, places, last, window)
        return graph.node("Attention", query, key, value, self._hidden[window], **how)
    forms = [("portable", "fp32", 24, ""), ("cuda", "fp32", 24, ""), ("cuda", "fp16", 24, ""), ("portable", "fp16", 24, ""), ("portable", "fp32", 20, ""), ("onnxruntime", "fp32", 24, ""), ("onnxruntime", "fp16", 24, ""), ("cuda", "int8", 24, ""), ("cuda", "int4", 24, "")]
    place = Path(tempfile.mkdtemp())
    for shape, more in shapes.items():
        with step(P, shape):
            try: config = GPTConfig(**(base | more))
            except Exception as e: emit(P, shape=shape, error=str(e)); continue
            model = build(config, 1).eval()
            with torch.no_grad():
                for p in model.parameters():
                    if p.dim() == 2: p.mul_(5.0)
            truth = TorchCausal(model)
            ids = np.random.default_rng(3).integers(0, 512, (4, 100))
            # name -> calls of (ids, pasts); the cache before is filled by torch through the reference's own prefill on the graph's CPU session
            spans = {
                "prompt": ([], [Span(0, 0, ids[0, :40], 3)]),
                "part": ([Span(0, 0, ids[0, :40], 0)], [Span(0, 40, ids[0, 40:64], 3)]),
                "token": ([Span(0, 0, ids[0, :7], 0)], [Span(0, 7, ids[0, 7:8], 1)]),
                "token row 1": ([Span(0, 0, ids[0, :40], 0), Span(1, 0, ids[1, :7], 0)], [Span(1, 7, ids[1, 7:8], 1)]),
                "tokens": ([Span(0, 0, ids[0, :40], 0), Span(1, 0, ids[1, :7], 0), Span(2, 0, ids[2, :90], 0)], [Span(r, n, ids[r, n:n + 1], 1) for r, n in ((0, 40), (1, 7), (2, 90))]),
                "prompts": ([], [Span(0, 0, ids[0, :40], 2), Span(1, 0, ids[1, :38], 2)]),
                "parts": ([Span(0, 0, ids[0, :20], 0), Span(1, 0, ids[1, :7], 0)], [Span(0, 20, ids[0, 20:30], 2), Span(1, 7, ids[1, 7:16], 2)]),
            }
            for variant, precision, opset, patch in forms:
                need(5)
                onnx_gpt._Slots.__init__, onnx_gpt._Slots.attend = init, attend
                if patch == "parts": onnx_gpt._Slots.__init__ = parts_init
                if patch == "mask": onnx_gpt._Slots.attend = mask_attend
                name = f"{shape} {variant} {precision} {opset} {patch}"
                with step(P, name):
                    path = place / f"{abs(hash(name))}.onnx"
                    write_graph(model, path, {}, GraphOptions(variant, precision, opset))
                    line, where = {}, None
                    for device in ("cpu",) if CPU else ("cuda:0",):
                        if device == "cpu" and variant == "cuda" and precision != "fp32" and not CPU: continue
                        try: backend = run_graph(path, config, BackendOptions(device, threads=2), precision)
                        except Exception as e: line[device] = f"{type(e).__name__}: {e}"[:300]; continue
                        errors = {}
                        for case, (before, call) in spans.items():
                            try:
                                cache, exact = backend.new_cache(3), truth.new_cache(3)
                                for s in before: truth.step([s], exact); backend.step([s], cache)
                                want = torch.as_tensor(truth.step(call, exact)).numpy(); found = torch.as_tensor(backend.step(call, cache)).cpu().numpy()
                                errors[case] = off(found, want)
                            except Exception as e: errors[case] = f"{type(e).__name__}: {e}"[:200]
                        line[device] = errors
                    if not CPU:
                        try: where = on_cpu_nodes(session(str(path), CUDA))
                        except Exception as e: where = str(e)[:100]
                    emit(P, shape=shape, variant=variant, precision=precision, opset=opset, patch=patch, cpu_nodes=where, **line)

def path():
    """The failing test's own calls, in the runner's parts: separate buffers by session.run, and IO binding with and without in place."""
    import torch
    from throughline.inference.exports.export import write_graph
    from throughline.models.config import GPTConfig
    from throughline.models.init import build
    config = GPTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4, tied=False)
    model = build(config, 1).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2: p.mul_(5.0)
    file = Path(tempfile.mkdtemp()) / "m.onnx"
    write_graph(model, file, {})
    ids = np.random.default_rng(3).integers(0, 512, 64)
    cpu, gpu = session(str(file), ["CPUExecutionProvider"]), session(str(file), CUDA)
    names = [i.name for i in cpu.get_inputs() if i.name.startswith("past.")]
    def call(s, piece, past, stores):
        feeds = {"input_ids": piece[None], "past_length": np.array([past]), "logit_positions": np.array([[len(piece) - 1]])} | stores
        out = s.run(None, feeds)
        got = dict(zip([o.name for o in s.get_outputs()], out))
        return got["logits"], {n: got["present" + n[4:]] for n in names}
    empty = {n: np.zeros((1, 4, 128, 32), np.float32) for n in names}
    for sizes in ((40, 24), (7, 1), (1, 1, 1)):
        with step(P, f"run {sizes}"):
            a, b, at = dict(empty), dict(empty), 0
            for size in sizes:
                la, a = call(cpu, ids[at:at + size], at, a)
                lb, own = call(gpu, ids[at:at + size], at, b)
                lc, _ = call(gpu, ids[at:at + size], at, {n: x for n, x in a.items()})
                emit(P, sizes=sizes, at=at, size=size, logits=off(lb, la), caches={n: off(own[n][:, :, :at + size], a[n][:, :, :at + size]) for n in names}, logits_on_the_cpus_cache=off(lc, la))
                b, at = own, at + size

    # which optimisation, which node
    model = onnx.load(str(file))
    past40 = dict(empty); _, past40 = call(cpu, ids[:40], 0, past40)
    def levelled(level):
        o = ort.SessionOptions(); o.log_severity_level = 3; o.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        return ort.InferenceSession(str(file), o, providers=CUDA)
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        with step(P, level):
            s = levelled(level)
            line = {}
            for name, piece, at, st in (("prompt", ids[:40], 0, empty), ("part", ids[40:], 40, past40), ("token", ids[40:41], 40, past40)):
                line[name] = off(call(s, piece, at, st)[0], call(cpu, piece, at, st)[0])
            emit(P, optimisation=level, **line)
    with step(P, "nodes"):
        inferred = onnx.shape_inference.infer_shapes(model)
        kinds = {v.name: v for v in list(inferred.graph.value_info)}
        have = {o_.name for o_ in model.graph.output}
        order = [(n, out) for n in model.graph.node for out in n.output if out and out not in have]
        for n, out in order:
            model.graph.output.append(kinds.get(out) or h.make_empty_tensor_value_info(out) if hasattr(h, "make_empty_tensor_value_info") else onnx.ValueInfoProto(name=out))
        a_, b_ = session(model, ["CPUExecutionProvider"]), session(model, CUDA)
        feeds = {"input_ids": ids[None, 40:], "past_length": np.array([40]), "logit_positions": np.array([[23]])} | past40
        names_ = [o_.name for o_ in a_.get_outputs()]
        x, y = dict(zip(names_, a_.run(None, feeds))), dict(zip([o_.name for o_ in b_.get_outputs()], b_.run(None, feeds)))
        bad = []
        for n in model.graph.node:
            for out in n.output:
                if out in x:
                    e = off(y[out], x[out]) if x[out].dtype != bool else float((x[out] != y[out]).mean())
                    if isinstance(e, str) or e > 1e-4: bad.append((n.op_type, out, e, list(x[out].shape)))
        emit(P, nodes=len(x), first_bad=bad[:6], count_bad=len(bad), logits=off(y["logits"], x["logits"]))
    if CPU: return
    # IO binding on torch's memory
    def bound(s, piece, at, asked, stores, out, spare, keep=False):
        feeds = {"input_ids": torch.from_numpy(piece[None].copy()).cuda(), "past_length": torch.tensor([at]).cuda(), "logit_positions": torch.arange(len(piece) - asked, len(piece))[None].cuda()}
        logits = torch.zeros(1, asked, 512, device="cuda")
        b = s.io_binding()
        at_ = lambda t: t.data_ptr() or spare.data_ptr()
        for n_, t_ in feeds.items(): b.bind_input(n_, "cuda", 0, np.int64, tuple(t_.shape), at_(t_))
        b.bind_output("logits", "cuda", 0, np.float32, tuple(logits.shape), at_(logits))
        for n_ in names:
            b.bind_input(n_, "cuda", 0, np.float32, tuple(stores[n_].shape), stores[n_].data_ptr())
            b.bind_output("present" + n_[4:], "cuda", 0, np.float32, tuple(out[n_].shape), out[n_].data_ptr())
        torch.cuda.synchronize(); s.run_with_iobinding(b); torch.cuda.synchronize()
        return logits.cpu().numpy()
    for first_asked in (1, 0):
        for in_place in (False, True):
            for rows in (1, 2):
                with step(P, f"binding asked {first_asked} in place {in_place} rows {rows}"):
                    spare = torch.zeros(1, device="cuda")
                    whole = {n: torch.zeros(rows, 4, 128, 32, device="cuda") for n in names}
                    stores = {n: t[rows - 1:] for n, t in whole.items()}
                    out = stores if in_place else {n: torch.zeros(1, 4, 128, 32, device="cuda") for n in names}
                    l0 = bound(gpu, ids[:40], 0, first_asked, stores, out, spare)
                    w0, want = call(cpu, ids[:40], 0, empty)
                    c0 = {n: off(out[n].cpu().numpy()[:, :, :40], want[n][:, :, :40]) for n in names}
                    l1 = bound(gpu, ids[40:], 40, 1, out, out if in_place else {n: torch.zeros(1, 4, 128, 32, device="cuda") for n in names}, spare)
                    w1, _ = call(cpu, ids[40:], 40, want)
                    emit(P, binding=True, first_asked=first_asked, in_place=in_place, row=rows - 1, prompt=off(l0, w0) if first_asked else None, caches={k: c0[k] for k in list(c0)[:8]}, part=off(l1, w1))

def torch_of_step():
    pass

emit(P, versions={"onnxruntime": ort.__version__}, providers=ort.get_available_providers(), tag=tag)
{"ops": ops, "models": models, "path": path}[what]()
