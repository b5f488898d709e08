"""Messages of peers that speak an old version of ZMTP."""

import socket

import zmq

from gradwire.runtime.zeromq.connections.connection_limits import ConnectionLimits


def test_a_message_whose_connection_is_unknown_is_no_error() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        monitor = router.get_monitor_socket()
        limits = ConnectionLimits(
            monitor,
            port,
            max_others=4,
            has_keys=False,
            is_known=lambda identity: False,
            on_change=lambda *_: None,
            on_cut=lambda *_: None,
        )
        with socket.create_connection(("127.0.0.1", port), 30.0) as peer:
            peer.sendall(b"\x01\x00" + b"\x06\x00hello")  # ZMTP 1.0: no name, and a message
            assert router.poll(30_000)
            identity, *frames = router.recv_multipart(copy=False)
            assert [frame.bytes for frame in frames] == [b"hello"]
            limits.delivered(identity.bytes, frames)
            limits.is_member(identity.bytes, frames[0])
        router.disable_monitor()
    finally:
        context.destroy(linger=0)
