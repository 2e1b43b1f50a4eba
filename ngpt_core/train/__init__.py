"""How is a model trained: one step, the run around it, and the folder it writes?

config.py       the settings              trainer.py    one step               parallel.py          FSDP2 and HSDP
run.py          new, or resumed?          loop.py       step by step           expert_parallel.py   experts on several ranks
folder.py       the run on the disk       evaluate.py   the held-out loss      float8.py            products in float8
checkpoint.py   saving and resuming       metrics.py    what is logged         world.py             ranks and devices
memory.py       running out of it         flops.py      arithmetic per token   feed.py              batches, read ahead
message.py      what the ranks tell each other
"""
