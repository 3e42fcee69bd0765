"""One rank of the tests: run the named cases in turn and write what failed.

torchrun --nproc-per-node=N tests/distributed/worker.py OUTCOMES.json case case ...
"""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from data_parallel import CASES as DATA_PARALLEL
from faults import CASES as FAULTS
from sharded import CASES as SHARDED

CASES = {**DATA_PARALLEL, **SHARDED, **FAULTS}


def main() -> None:
    path, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    outcomes: dict[str, str] = {}
    for name in names:
        failures = attempt(name)
        outcomes[name] = "\n".join(filter(None, failures))
        if outcomes[name]:
            break  # ranks may be out of step
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def attempt(name: str) -> list[str]:
    """What every rank has to complain about one case."""
    complaint = ""
    try:
        CASES[name]()
    except Exception:
        complaint = f"rank {dist.get_rank()}: {traceback.format_exc()}"
    complaints = [""] * dist.get_world_size()
    dist.all_gather_object(complaints, complaint)
    return complaints


if __name__ == "__main__":
    main()
