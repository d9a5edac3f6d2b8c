"""Exchange of residual streams, ``hc_mult`` times the hidden size, between pipeline stages."""

import functools

from megatron_dsa.patches import replace


@functools.cache
def send_streams_between_stages() -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    @replace(P2PCommunicator, "_communicate")
    def communicate(original, self, *, tensor_shape, **others):
        streams = getattr(self.config, "hc_mult", 1)
        if streams > 1 and tensor_shape:
            tensor_shape = (*tensor_shape[:-1], streams * tensor_shape[-1])
        return original(self, tensor_shape=tensor_shape, **others)
