"""How is a model trained: one step, the run around it, and the folder that it leaves?

config.py       what was asked for        trainer.py    one step               parallel.py          FSDP2 and HSDP
run.py          new, or resumed?          loop.py       step after step        expert_parallel.py   experts on ranks
folder.py       the run on the disk       evaluate.py   the held-out loss      float8.py            products in float8
checkpoint.py   surviving                 metrics.py    what is logged         world.py             ranks and devices
memory.py       when it runs out          flops.py      arithmetic per token
"""
