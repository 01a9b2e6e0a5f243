"""The contestant's process of a race: it alone imports the script, and answers the evaluator over a pipe.

An answer is a letter (`OK`, `REFUSED`, `FAILED`) and then numbers, tensors or a message, which can run no code in the evaluator.
The script may have replaced anything in this process, so the evaluator checks every answer that counts.
"""

from multiprocessing.connection import Connection
from pathlib import Path

from common import cli
from common import device as devices
from common.errors import UsageError
from common.options import Options
from common.precision import Precision
from common.timing import Clock
from common.training import distributed, version_files
from common.training import step as steps

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

OK, REFUSED, FAILED = b"o", b"r", b"f"
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Contestant:
    """The step of a version, made and checked as in a run, and copies of its weights and moments from before the last block."""

    def __init__(self, script: Path, options: Options) -> None:
        version, self.device = version_files.load(script), devices.select(options.device)
        devices.prepare(self.device, options.seed)
        precision, settings = Precision(self.device, cli.amp_dtype(options)), version_files.switched(version, options)
        batch = version_files.random_batch(options, self.device)
        self.model, self.optimizer, self.step = steps.prepare(version, settings, precision, batch)
        self.parameters = [parameter.detach() for parameter in self.model.parameters()]

    def copies(self) -> list[list[Tensor]]:
        """Of the parameters and of both moments, in the order of KINDS."""
        states = distributed.states(self.optimizer)
        moments = [[states[parameter][kind] for parameter in self.model.parameters()] for kind in KINDS[1:]]
        return [[*torch._foreach_mul(tensors, 1)] for tensors in (self.parameters, *moments)]  # in a few launches

    def train(self, block: np.ndarray) -> bytes:
        """Takes a step on each batch of the block, [n, 2, B, S]; milliseconds by this process's clock, and the n losses."""
        self.before, clock = self.copies(), Clock(self.device)
        clock.mark()
        batches, losses = torch.from_numpy(block).to(self.device).long(), torch.empty(len(block), device=self.device)
        for i, (ids, targets) in enumerate(batches):
            losses[i] = self.step((ids, targets))  # copied: a captured step overwrites it
        clock.mark()
        return np.array([clock.milliseconds(0, 1), *losses.tolist()]).tobytes()

    def states(self) -> bytes:
        """Weights and moments before and after the last block, under Version 1's names, as safetensors."""
        found, after = {}, self.copies()
        for when, copies in (("before", self.before), ("after", after)):
            for kind, tensors in zip(KINDS, copies, strict=True):
                torch._foreach_copy_(self.parameters, tensors)  # where baseline_state_dict looks
                for name, tensor in self.model.baseline_state_dict().items():  # type: ignore[operator]  # every version has it
                    found[f"{when} {kind} {name}"] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        torch._foreach_copy_(self.parameters, after[0])
        return safetensors.torch.save(found)


def serve(connection: Connection, script: Path, options: Options) -> None:
    """Says that the script is ready; then answers a block with `train`, and None with `states`, until the evaluator leaves."""
    try:
        contestant = Contestant(script, options)
        connection.send_bytes(OK)
        while True:
            block = connection.recv()
            connection.send_bytes(OK + (contestant.states() if block is None else contestant.train(block)))
    except EOFError:
        pass
    except UsageError as error:
        connection.send_bytes(REFUSED + str(error).encode())
    except Exception as error:
        connection.send_bytes(FAILED + f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}".encode())
