"""``verify-model`` for five families on CUDA, in at most five minutes.

Exit code: 0 every run was exact; 1 some run was not, or a run was left out for lack of time; 2 no CUDA device.
"""

from __future__ import annotations

import sys
from time import perf_counter

FAMILIES = ("gpt_oss", "qwen3_next", "deepseek_v4", "gemma3", "deepseek_v32")
DTYPES = ("float32", "bfloat16")
BUDGET_S = 270.0


def main() -> int:
    """Run the check and print one line per family and dtype."""
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device here (or torch is a CPU build): nothing was checked", file=sys.stderr)
        return 2

    from kvloom.errors import KVLoomError
    from kvloom.testing.families import random_model, tiny_config
    from kvloom.verification.report import Verdict
    from kvloom.verification.verify import verify_model

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    started, failed = perf_counter(), 0
    for dtype in DTYPES:
        for family in FAMILIES:
            if perf_counter() - started > BUDGET_S:
                print(f"{family:14} {dtype:9} LEFT OUT: the five minutes are over")
                failed += 1
                continue
            begun = perf_counter()
            try:
                report = verify_model(random_model(tiny_config(family), 0, dtype).to("cuda"), name=family)
                verdict, reason = report.verdict, report.reason
            except KVLoomError as error:
                verdict, reason = Verdict.UNSUPPORTED, str(error)
            failed += verdict is not Verdict.EXACT
            seconds = perf_counter() - begun
            print(f"{family:14} {dtype:9} {verdict.value:12} {seconds:5.1f} s  {reason}", flush=True)
    print(f"gpu-check: {'all exact' if not failed else f'{failed} not exact'} in {perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
