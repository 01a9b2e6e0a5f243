"""The instrument: everything that is the same in every version of the model.

Configuration, device, data, clock, spans, command line, training run and profiling live here; the model and its
operations live in the version folders, which hand themselves to `common.training.run.main`.
"""
