"""Pipeline stages that exchange residual streams: hidden states ``hc_mult`` times as wide.

megatron-core's schedules take ``hidden_size`` for the width of what stages exchange. All of them
receive through one method of the communicator, which is told the right width here.
"""

import functools


@functools.cache
def send_streams_between_stages() -> None:
    """Let stages of models with hyper-connections receive all streams; others see no difference."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original = P2PCommunicator._communicate

    @functools.wraps(original)
    def _communicate(self, *, tensor_shape, **others):
        streams = getattr(self.config, "hc_mult", 1)
        if streams > 1 and tensor_shape:
            tensor_shape = (*tensor_shape[:-1], streams * tensor_shape[-1])
        return original(self, tensor_shape=tensor_shape, **others)

    P2PCommunicator._communicate = _communicate
