# SPDX-License-Identifier: Apache-2.0
"""Which requests the layout's calling model asks Triton about: none after its last response."""

import threading

from speccompile.serving.triton.trtllm.bls_part import OpenRelays, Relay


class Sender:
    """A response sender whose answer waits for a thread that tries to close the request."""

    def __init__(self) -> None:
        self.relays, self.num_asked = OpenRelays(), 0
        self.relay = Relay(self, "1")
        self.closer = threading.Thread(target=self.relays.close, args=[self.relay])
        self.was_closed_while_asked: bool | None = None

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        self.closer.start()
        self.closer.join(timeout=0.2)
        self.was_closed_while_asked = not self.closer.is_alive()
        return True


def test_a_request_is_not_closed_while_triton_is_asked_and_not_asked_once_closed():
    sender = Sender()
    sender.relays.add(sender.relay)
    assert sender.relays.running() == [sender.relay]
    assert sender.relays.is_gone(sender.relay)
    assert sender.was_closed_while_asked is False
    sender.closer.join()
    assert sender.relays.running() == []
    assert not sender.relays.is_gone(sender.relay)
    assert sender.num_asked == 1


def test_a_request_that_was_asked_to_stop_is_not_running():
    sender = Sender()
    sender.relays.add(sender.relay)
    sender.relay.is_stopped = True
    assert sender.relays.running() == []
