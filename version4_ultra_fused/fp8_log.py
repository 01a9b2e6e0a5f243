# cd version4_ultra_fused; python fp8_log.py OUT.jsonl --preset large --use-amp --enable-fp8 ...
import argparse, json, sys

sys.path.insert(0, ".")
import tiny_llama_v4 as v4
import torch
from common import cli
from common.options import RunOptions
from version4_ultra_fused.kernels.fp8.scales import Scales

out, rows, names, found = sys.argv.pop(1), [], {}, []
init, end, finished = Scales.__init__, Scales.end, v4.Run.finished


def watched_init(self, weights):
    init(self, weights)
    self.amax, self.fill = torch.zeros_like(self.seen), torch.zeros_like(self.seen)
    found.append(self)


def watched_end(self):  # captured with the step: static buffers, no sync in it
    self.amax.copy_(self.seen / self.unit)
    self.fill.copy_(self.seen / (self.scale * self.most))
    end(self)


def watched_finished(run, loss):
    for weight, number in found[-1].place.items():
        names[number] = next(n for n, w in run.model.named_parameters() if w is weight)
    amax, fill = found[-1].amax, found[-1].fill  # [products, 3]: x, W, gradient
    worst, place = fill.flatten().cpu().topk(5)
    said = [
        f"{names[p // 3]}:{'xwg'[p % 3]} {v:.2f}" for v, p in zip(worst.tolist(), place.tolist())
    ]
    rows.append({"loss": loss.item(), "amax": amax.tolist(), "fill": fill.tolist(), "worst": said})
    print(len(rows), f"{loss.item():.4f}", "clipped", int((fill > 1.03).sum()), *said, flush=True)
    finished(run, loss)


Scales.__init__, Scales.end, v4.Run.finished = watched_init, watched_end, watched_finished
parser = argparse.ArgumentParser()
for add in (cli.add_model_flags, cli.add_training_flags, cli.add_profiling_flags):
    add(parser)
cli.add_switches(parser, v4.SWITCHES)
v4.train(cli.resolve(RunOptions, cli.parse(parser), v4.SWITCHES))
open(out, "w").write("\n".join(map(json.dumps, [names, *rows])))
