"""One emulated engine in this process, so that a test can look at its memory: `python engine_run.py JSON` prints JSON.

The argument: `engine` (arguments of vLLM's `LLM`), `prompts` (token ids), `max_tokens`, and `damage`, which makes one
word of the prompts' cached blocks wrong before they are sent once more.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    wanted = json.loads(sys.argv[1])
    os.environ |= {"KVBERTH_EMULATE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    from kvberth.emulator import model_folder

    llm = LLM(model=str(model_folder("small")), disable_log_stats=False, **wanted["engine"])
    sampling = SamplingParams(max_tokens=wanted["max_tokens"], ignore_eos=True)

    def answers() -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]

    result: dict[str, Any] = {"answers": answers()}
    if wanted.get("damage"):
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        words = worker._contexts._canary._words
        (layers, blocks, slots, tokens) = words[:, :, :, :].nonzero()
        place = len(layers) // 2
        words[layers[place], blocks[place], slots[place], tokens[place]] ^= 1 << 7
        result |= {"layer": int(layers[place]), "block": int(blocks[place]), "slot": int(tokens[place])}
        result["answers_after_damage"] = answers()
    for name in ("corruptions", "verified_tokens"):
        result[name] = REGISTRY.get_sample_value(f"kvberth:emulator_{name}_total", {"rank": "0"})
    (preemptions,) = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    result["preemptions"] = preemptions
    print(json.dumps(result))


if __name__ == "__main__":
    main()
