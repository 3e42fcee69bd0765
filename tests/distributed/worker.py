"""One rank of the tests: run the named cases in turn and write what failed.

torchrun --nproc-per-node=N tests/distributed/worker.py OUTCOMES.json case case ...
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from data_parallel import CASES as DATA_PARALLEL
from experts import CASES as EXPERTS
from faults import CASES as FAULTS
from faults import FATAL, TIMEOUT
from observed import CASES as OBSERVED
from owned import CASES as OWNED
from sharded import CASES as SHARDED
from tensor import CASES as TENSOR

CASES = {**DATA_PARALLEL, **SHARDED, **FAULTS, **OBSERVED, **OWNED, **TENSOR, **EXPERTS}


def main() -> None:
    path, *names = sys.argv[1:]
    fatal = names[0] in FATAL
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT if fatal else 30))
    if fatal:
        Path(path).write_text(json.dumps({names[0]: complaint(FATAL[names[0]])}))
        os._exit(0)  # there is nobody left to say goodbye to
    outcomes: dict[str, str] = {}
    for name in names:
        write(path, {**outcomes, name: "the ranks ended in the middle of it"})
        outcomes[name] = everyones(complaint(CASES[name]))
        write(path, outcomes)
        if outcomes[name]:
            break  # ranks may be out of step; test_distributed.py launches the cases after it anew
    gc.collect()  # torch can hang where DDP outlives its process group
    dist.destroy_process_group()


def write(path: str, outcomes: dict[str, str]) -> None:
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(outcomes))


def complaint(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return f"rank {dist.get_rank()}: {traceback.format_exc()}"
    return ""


def everyones(complaint: str) -> str:
    """What all ranks have to complain about."""
    complaints: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint)
    return "\n".join(filter(None, complaints))


if __name__ == "__main__":
    main()
