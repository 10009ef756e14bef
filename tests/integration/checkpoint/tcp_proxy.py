"""A TCP proxy before a server: open, slow or shut, like a network or a server with faults."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class TcpProxy:
    """A proxy that passes connections on to a local port.

    delay_s   by which it delays each piece of data that a client sends
    """

    def __init__(self, server_port: int) -> None:
        self._server_port, self._listener = server_port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.delay_s, self.is_open, self.passed_bytes = 0.0, True, 0
        self.passed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        """Close all connections and accept no further ones."""
        self.is_open = False
        for connection in list(self._connections):
            _end(connection)

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self._closed = True
        self.shut()
        _end(self._listener)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self.is_open:
                _end(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                _end(client)
                continue
            self._connections |= {client, server}
            for pair in ((client, server), (server, client)):
                threading.Thread(
                    target=self._emit, args=(*pair, pair[0] is client), daemon=True
                ).start()

    def _emit(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_upload:
                    time.sleep(self.delay_s)
                    with self.passed:
                        self.passed_bytes += len(data)
                        self.passed.notify_all()
                target.sendall(data)
        except OSError:
            pass  # one side has closed the connection; close the other side
        finally:
            for end in (source, target):
                self._connections.discard(end)
                _end(end)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
