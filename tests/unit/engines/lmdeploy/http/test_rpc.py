"""What an engine process answers arrives, however much of it there is."""

import pickle

import zmq

from engines.lmdeploy.http.rpc import rpc_server_init

ANSWERS = 5000
DEADLINE_MS = 30_000


class Server:
    """As LMDeploy makes its own."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://localhost")


def test_answers_wait_for_a_slow_reader_and_none_is_dropped() -> None:
    server = Server.__new__(Server)
    rpc_server_init(Server.__init__)(server)
    client = server.context.socket(zmq.DEALER)
    client.set_hwm(1)
    try:
        client.connect(f"tcp://localhost:{server.port}")
        client.send(b"hello")
        assert server.socket.poll(DEADLINE_MS)
        name, _ = server.socket.recv_multipart()
        for number in range(ANSWERS):
            server.socket.send_multipart([name, pickle.dumps({"number": number, "filling": b"x" * 4096})])
        for number in range(ANSWERS):
            assert client.poll(DEADLINE_MS), f"answer {number} was lost"
            assert pickle.loads(client.recv())["number"] == number  # noqa: S301 - our own
    finally:
        client.close(0)
        server.socket.close(0)
        server.context.term()
