"""Two servers over HTTP, one that verifies trees on kgen and one without speculation: the same greedy tokens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kgen.workload import read_capture

HEADS, LATENT, ROPE, NOPE, VALUE = 8, 512, 64, 128, 128
HIDDEN, VOCABULARY, LAYERS = 256, 256, 2
SHARPNESS = 1000
"""What queries are multiplied by: scores are hundreds apart, and a head looks at one token."""
NEW_TOKENS = 13
NEAR_TIE = 0.05
"""Lead of a greedy token's logit over the next that rounding may undo: bf16 logits here are 0.016 apart."""
PROMPTS = [[7, 91, 200, 33, 5, 120, 64, 18, 250], [14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]]


def write_model(folder: Path) -> None:
    """A DeepSeek-V2 checkpoint of random weights: attention of real shapes, two layers, little else."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": LATENT, "q_lora_rank": None,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "vocab_size": VOCABULARY,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": LAYERS,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "rope_scaling": {
            "type": "yarn", "rope_type": "deepseek_yarn", "factor": 2, "original_max_position_embeddings": 256,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)
        return torch.as_tensor(values, dtype=torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        weights = {
            "input_layernorm": ones(HIDDEN),
            "post_attention_layernorm": ones(HIDDEN),
            "self_attn.q_proj": normal(HEADS * (NOPE + ROPE), HIDDEN, SHARPNESS),
            "self_attn.kv_a_proj_with_mqa": normal(LATENT + ROPE, HIDDEN),
            "self_attn.kv_a_layernorm": ones(LATENT),
            "self_attn.kv_b_proj": normal(HEADS * (NOPE + VALUE), LATENT),
            "self_attn.o_proj": normal(HIDDEN, HEADS * VALUE, 2),
            "mlp.gate_proj": normal(128, HIDDEN),
            "mlp.up_proj": normal(128, HIDDEN),
            "mlp.down_proj": normal(HIDDEN, 128),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Server:
    """A server of its own process group, under way."""

    def __init__(self, model: Path, log: Path, environment: dict[str, str], **more: str | int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log, self._url = log, f"http://127.0.0.1:{port}"
        arguments = {
            "model-path": model, "device": "cpu", "skip-tokenizer-init": None, "skip-server-warmup": None,
            "page-size": 1, "context-length": 128, "max-running-requests": 2, "max-total-tokens": 512,
            "cuda-graph-backend-decode": "disabled", "cuda-graph-backend-prefill": "disabled",
            "disable-radix-cache": None, "enable-metrics": None, "port": port, **more,
        }  # fmt: skip
        words = [
            str(word)
            for name, value in arguments.items()
            for word in ("--" + name.replace("_", "-"), value)
            if word is not None
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("server_on_cpu.py")), *words],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )

    def ask(self, path: str, body: Any = None) -> str:
        """The answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def wait(self) -> None:
        """Until it answers; AssertionError with its log if it ends, or takes too long."""
        until = time.monotonic() + 120
        while True:
            try:
                self.ask("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                alive = self.process.poll() is None and time.monotonic() < until
                assert alive, self._log.read_text()[-3000:]
                time.sleep(0.5)

    def answers(self, **more: Any) -> Any:
        """Of both prompts, greedily."""
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        return json.loads(self.ask("/generate", {"input_ids": PROMPTS, "sampling_params": sampling, **more}))

    def least_lead(self) -> float:
        """By how much the logit of a greedy token leads that of the next, at least."""
        answers = self.answers(return_logprob=True, top_logprobs_num=2)
        tops = [top for answer in answers for top in answer["meta_info"]["output_top_logprobs"]]
        return float(min(best[0] - second[0] for best, second in tops))

    def generate(self) -> tuple[list[list[int]], int]:
        """Greedy tokens of both prompts, and how many verify forwards they took."""
        answers = self.answers()
        verified = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
        return [answer["output_ids"] for answer in answers], verified


@contextmanager
def serving(*server: Any, **more: Any) -> Iterator[Server]:
    started = Server(*server, **more)
    try:
        yield started
    finally:
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


@pytest.mark.timeout(240)
def test_trees_of_drafts_give_what_decoding_gives(tmp_path: Path) -> None:
    model, capture, log = tmp_path / "model", tmp_path / "capture.jsonl", tmp_path / "kgen.log"
    model.mkdir()
    write_model(model)
    speculation: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}
    with (
        ThreadPoolExecutor() as at_once,
        serving(model, log, {"KGEN_CAPTURE": str(capture)}, attention_backend="kgen", **speculation) as kgen,
        serving(model, tmp_path / "stock.log", {}, attention_backend="triton") as stock,
    ):
        list(at_once.map(Server.wait, (kgen, stock)))
        (first, steps), (expected, _) = at_once.map(Server.generate, (kgen, stock))
        again, fewer = kgen.generate()
        metrics = kgen.ask("/metrics")
        lead = stock.least_lead()

    assert lead > NEAR_TIE  # else equal tokens would be luck
    assert first == again == expected
    assert all(len(tokens) == NEW_TOKENS and len(set(tokens)) > NEW_TOKENS // 2 for tokens in first), first
    assert fewer < steps  # the n-grams of the first answer were drafted, accepted and moved
    counted: Counter[str] = Counter()
    for line in metrics.splitlines():
        if line.startswith("kgen_"):
            counted[line.split("{")[0]] += int(float(line.split()[-1]))
    assert counted["kgen_verify_forwards_total"] > 0
    assert counted["kgen_kv_moves_total"] == counted["kgen_verify_forwards_total"]
    assert sum(read_capture(capture, "verify_mla").values()) == counted["kgen_verify_forwards_total"]
    left = {line.split("leaves ")[1] for line in log.read_text().splitlines() if "leaves " in line}
    assert left == {"attention to SGLang: extend is no verify"}
