"""What a training job will do and need, worked out without a GPU: ``--dsa-dry-run``.

The modules of a rank are built on the meta device, with process groups of the job's size that send
nothing, and run one microbatch: shapes go through every layer, Megatron's and ours, so that what
autograd keeps, what is alive at the same time and what is sent are counted, not estimated
(:mod:`.memory_tracker`). Only operations are replaced, by their fakes
(:mod:`megatron_dsa.ops.meta`), which allocate what the implementations do.
"""
