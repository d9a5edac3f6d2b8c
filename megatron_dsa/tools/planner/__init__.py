"""What a training job will do and need, worked out without a GPU: ``--dsa-dry-run``.

The modules of a rank are built on the meta device, with process groups of the job's size that send
nothing, and run one microbatch: shapes go through every layer, Megatron's and ours, so that what
autograd keeps, what is alive at the same time and what is sent are counted, not estimated
(:mod:`.tracker`). Only kernels that need a GPU are replaced, by what they allocate
(:mod:`.fake_kernels`).
"""
