"""The learning rate of each step (`--lr-schedule`): constant, or a cosine (Loshchilov and Hutter
2017, arXiv:1608.03983).
"""

import math

from common.options import RunOptions

import torch
from torch import Tensor


def learning_rate(options: RunOptions, step: int) -> float:
    """The rate of a step, the first of which is 0.

    With the rate r of the options, a warm-up of W steps and a decay that ends at step T
    (`lr_decay_steps`, or all steps):

        step < W                    r (step + 1) / W
        constant                    r
        cosine                      r (1 + cos(pi (step - W) / (T - W))) / 2, and 0 from step T on
    """
    rate = options.learning_rate
    warm_up = options.lr_warmup_steps
    if step < warm_up:
        return rate * (step + 1) / warm_up
    if options.lr_schedule == "constant":
        return rate
    decay = (options.lr_decay_steps or options.num_steps) - warm_up
    return rate * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / decay))) / 2


def described(options: RunOptions) -> str:
    """ "constant", "cosine to step 300 after 20 steps"."""
    text = options.lr_schedule
    if options.lr_schedule == "cosine":
        text += f" to step {options.lr_decay_steps or options.num_steps}"
    if options.lr_warmup_steps > 0:
        text += f" after {options.lr_warmup_steps} steps"
    return text


def move_rate(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Puts the rate into a tensor, which a captured step reads anew; it keeps a number."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of the next step, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
