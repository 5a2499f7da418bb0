"""B3: which paged attention works in this software; a decode step's attention of 128 rows that hold 1,024 tokens."""
import inspect, os, statistics, sys, time
from kit import emit, step, need
import torch
P = "b3"
SMALL = bool(os.environ.get("KIT_SMALL"))
device = torch.device("cuda", 0)
sync = torch.cuda.synchronize
emit(P, card=torch.cuda.get_device_name(0), torch=torch.__version__)
with step(P, "signatures"):
    from torch.nn.attention import varlen
    emit(P, varlen_attn=list(inspect.signature(varlen.varlen_attn).parameters), flash_forward=str(torch.ops.aten._flash_attention_forward.default._schema))
    import torch.nn.attention as A
    emit(P, impls=getattr(A, "list_flash_attention_impls", lambda: None)(), current=getattr(A, "current_flash_attention_impl", lambda: None)())
with step(P, "fa3"):
    import fa3_fwd_interface as fa3
    emit(P, fa3="imported", ops=[n for n in dir(torch.ops) if "fa3" in n or "flash_attn" in n])

def timed(call, layers=16, floor_bytes=0, graph=True):
    """ms of one call, of a CUDA graph of many."""
    call(); sync()
    def work():
        for _ in range(layers): call()
    how = "launched"
    if graph:
        try:
            side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side): call()
            torch.cuda.current_stream().wait_stream(side)
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, stream=side, capture_error_mode="thread_local"): work()
            run, how = g.replay, "captured"
        except Exception as e: how = f"launched, capture failed: {type(e).__name__}: {e}"[:160]; run = work; sync()
    else: run = work
    run(); e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    taken = []
    for _ in range(5): e[0].record(); run(); e[1].record(); sync(); taken.append(e[0].elapsed_time(e[1]) / layers)
    ms = statistics.median(taken)
    return {"ms": round(ms, 4), "tb_per_s": floor_bytes and round(floor_bytes / ms / 1e9, 2), "how": how}

for name, A_, G, D in (("llama-8b", 32, 8, 128), ("gpt2-124m", 12, 12, 64)):
    for B, T in ((128, 1024), (16, 1024)) if not SMALL else ((4, 512),):
        torch.manual_seed(0)
        kind = torch.bfloat16
        held = torch.randint(T // 2, T + 1, (B,), device=device, dtype=torch.int32) if not SMALL else torch.full((B,), T, device=device, dtype=torch.int32)
        held[0] = T
        q = torch.randn(B, A_, D, device=device, dtype=kind)
        dense_k, dense_v = (torch.randn(B, T, G, D, device=device, dtype=kind) for _ in range(2))
        bytes_ = int(held.sum()) * G * D * 2 * 2
        place = torch.arange(T, device=device)
        mask = (place < held[:, None])[:, None, None]
        want = torch.nn.functional.scaled_dot_product_attention(q[:, :, None].float(), dense_k.transpose(1, 2).float(), dense_v.transpose(1, 2).float(), attn_mask=mask, enable_gqa=True)[:, :, 0]
        def check(out): return round(float((out.reshape(B, A_, D).float() - want).abs().max() / want.abs().max()), 5)
        def line(route, call, **more):
            try:
                out = call(); err = check(out)
                emit(P, shape=name, rows=B, tokens=T, route=route, error=err, **timed(call, floor_bytes=bytes_, layers=4 if SMALL else 16), **more)
            except Exception as e: emit(P, shape=name, rows=B, tokens=T, route=route, failed=f"{type(e).__name__}: {e}"[:400], **more)
        def paged(page, spare=8):
            per = T // page; total = B * per + spare
            table = torch.randperm(total, device=device)[: B * per].view(B, per).int()
            k, v = (torch.zeros(total, page, G, D, device=device, dtype=kind) for _ in range(2))
            k[table.long().flatten()] = dense_k.view(B * per, page, G, D); v[table.long().flatten()] = dense_v.view(B * per, page, G, D)
            return k, v, table
        starts, ones = torch.arange(B + 1, device=device, dtype=torch.int32) * T, torch.arange(B + 1, device=device, dtype=torch.int32)
        with step(P, name):
            line("aten flash by bounds over whole rows (as the project does)", lambda: torch.ops.aten._flash_attention_forward(q, dense_k.flatten(0, 1), dense_v.flatten(0, 1), ones, starts, 1, T, 0.0, True, False, window_size_left=-1, window_size_right=0, seqused_k=held)[0])
            line("SDPA with a mask over whole rows", lambda: torch.nn.functional.scaled_dot_product_attention(q[:, :, None], dense_k.transpose(1, 2), dense_v.transpose(1, 2), attn_mask=mask, enable_gqa=True))
            for page in (16, 64, 256):
                k, v, table = paged(page)
                if "block_table" in str(torch.ops.aten._flash_attention_forward.default._schema):
                    line("aten flash with block_table", lambda: torch.ops.aten._flash_attention_forward(q, k, v, ones, starts, 1, T, 0.0, True, False, window_size_left=-1, window_size_right=0, seqused_k=held, block_table=table)[0], page=page)
                if "fa3_fwd_interface" in sys.modules:
                    line("FlashAttention 3 page_table", lambda: fa3.flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=held, page_table=table, causal=True), page=page)
                    if page == 64:
                        line("FlashAttention 3 page_table, pack_gqa", lambda: fa3.flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=held, page_table=table, causal=True, pack_gqa=True), page=page)
                        try:
                            meta = fa3.get_scheduler_metadata(B, 1, T, A_, G, D, held, qkv_dtype=kind, page_size=page, causal=True)
                            line("FlashAttention 3 page_table, scheduler metadata", lambda: fa3.flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=held, page_table=table, causal=True, scheduler_metadata=meta), page=page)
                        except Exception as e: emit(P, route="metadata", failed=f"{type(e).__name__}: {e}"[:200])
                if page == 16:
                    index = (table.long()[:, :, None] * page + torch.arange(page, device=device)).view(B, T)
                    flat_k, flat_v = k.view(-1, G, D), v.view(-1, G, D)
                    def gathered():
                        return torch.ops.aten._flash_attention_forward(q, flat_k[index.flatten()], flat_v[index.flatten()], ones, starts, 1, T, 0.0, True, False, window_size_left=-1, window_size_right=0, seqused_k=held)[0]
                    line("pages gathered, then aten flash", gathered, page=page)
            if "fa3_fwd_interface" in sys.modules:
                line("FlashAttention 3 over whole rows", lambda: fa3.flash_attn_with_kvcache(q[:, None], dense_k, dense_v, cache_seqlens=held, causal=True))
                # a mixed step: 7 rows read 512 new tokens each, the others one
        with step(P, f"{name} flex"):
            need(25)
            from torch.nn.attention.flex_attention import BlockMask, flex_attention
            page = 128
            k, v, table = paged(page, 0)
            # pool (1, G, pages * page, D); each row's blocks are its pages; a place is seen if its logical number is below `held`
            pool_k, pool_v = (x.flatten(0, 1).transpose(0, 1)[None].expand(B, -1, -1, -1) for x in (k, v))
            per = T // page; total = k.shape[0]
            owner = torch.full((total,), -1, device=device, dtype=torch.int32); number = torch.zeros(total, device=device, dtype=torch.int32)
            owner[table.long().flatten()] = torch.arange(B, device=device, dtype=torch.int32).repeat_interleave(per); number[table.long().flatten()] = torch.arange(per, device=device, dtype=torch.int32).repeat(B)
            def seen(b, h, qi, ki):
                p = ki // page
                return number[p] * page + ki % page < held[b]
            indices = torch.zeros(B, 1, 1, total, device=device, dtype=torch.int32); indices[:, 0, 0, :per] = table
            blocks = (-(-held // page)).view(B, 1, 1).int()
            mask_b = BlockMask.from_kv_blocks(blocks, indices, BLOCK_SIZE=(128, page), mask_mod=seen, seq_lengths=(1, total * page))
            began = time.perf_counter()
            fast = torch.compile(flex_attention, dynamic=False)
            def call(): return fast(q[:, :, None], pool_k, pool_v, block_mask=mask_b, enable_gqa=A_ != G)
            call(); sync(); emit(P, shape=name, rows=B, route="FlexAttention", compiled_in_s=round(time.perf_counter() - began, 1))
            line("FlexAttention block mask over pages", call, page=page)
        del dense_k, dense_v; torch.cuda.empty_cache()
with step(P, "fa3 prompts"):
    # parts of prompts and single tokens in one call over pages: correctness against dense float32
    A_, G, D, page = 32, 8, 128, 64
    news, pasts = [1, 17, 130, 1, 64], [100, 0, 70, 511, 448]
    B, T = len(news), 512
    k, v = (torch.randn(B, T, G, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(B * T // page, device=device).view(B, -1).int()
    pk, pv = torch.empty(B * T // page, page, G, D, device=device, dtype=torch.bfloat16), torch.empty(B * T // page, page, G, D, device=device, dtype=torch.bfloat16)
    pk[table.long().flatten()] = k.view(-1, page, G, D); pv[table.long().flatten()] = v.view(-1, page, G, D)
    q = torch.randn(sum(news), A_, D, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, *__import__("itertools").accumulate(news)], device=device, dtype=torch.int32)
    total = torch.tensor([n + p for n, p in zip(news, pasts)], device=device, dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, pk, pv, cache_seqlens=total, page_table=table, cu_seqlens_q=cu, max_seqlen_q=max(news), causal=True)
    worst = 0.0
    for i in range(B):
        n, p = news[i], pasts[i]
        keep = torch.arange(n + p, device=device) <= p + torch.arange(n, device=device)[:, None]
        one = torch.nn.functional.scaled_dot_product_attention(q[cu[i]:cu[i + 1]].transpose(0, 1)[None].float(), k[i, : n + p].transpose(0, 1)[None].float(), v[i, : n + p].transpose(0, 1)[None].float(), attn_mask=keep[None, None], enable_gqa=True)[0].transpose(0, 1)
        worst = max(worst, float((out[cu[i]:cu[i + 1]].float() - one).abs().max() / one.abs().max()))
    emit(P, route="FlashAttention 3 page_table, prompts and tokens in one call", error=round(worst, 5))
