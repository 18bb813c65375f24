"""A stand-in for a server that speaks OpenAI's protocol: its answer is the question with every word in capitals."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class OpenAIServer:
    """Serve on a free loopback port while the context lasts; `asked` holds the questions, `together` how many at once.

    Args:
        models: the names that it lists. lost_after: so many questions are answered, the others as by a server that
            was killed; None: all. wait: seconds that an answer takes. owner: the program that serves. calls: of
            functions, which take the place of the answer's text.
    """

    def __init__(
        self,
        models: tuple[str, ...] = ("teacher",),
        lost_after: int | None = None,
        wait: float = 0.0,
        owner: str = "someone",
        calls: list[dict] | None = None,
    ):
        self.models = models
        self.lost_after = lost_after
        self.wait = wait
        self.owner = owner
        self.calls = calls
        self.asked: list[dict] = []
        self.together = 0
        self._running = 0
        self._lock = threading.Lock()
        self.stopped = threading.Event()

    def __enter__(self):
        server = self

        class Handler(_Handler):
            state = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def begin(self, question: dict) -> bool:
        """Note a question; False if it finds no answer any more."""
        with self._lock:
            if self.lost_after is not None and len(self.asked) >= self.lost_after:
                return False
            self.asked.append(question)
            self._running += 1
            self.together = max(self.together, self._running)
        self.stopped.wait(self.wait)
        return True

    def end(self) -> None:
        """Note that an answer was given."""
        with self._lock:
            self._running -= 1


class _Handler(BaseHTTPRequestHandler):
    state: OpenAIServer

    def do_GET(self):
        served = [{"id": n, "object": "model", "owned_by": self.state.owner} for n in self.state.models]
        self._reply({"object": "list", "data": served})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.state.begin(asked):
            self.close_connection = True  # without an answer
            return
        is_chat = self.path.endswith("/chat/completions")
        words = (asked["messages"][-1]["content"] if is_chat else asked["prompt"]).upper().split()
        given = " ".join(words[: asked["max_tokens"]])
        reason = "stop" if len(words) <= asked["max_tokens"] else "length"
        choice = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": given}} if is_chat else {"text": f" {given}"}
        if self.state.calls:
            message = {"role": "assistant", "content": None, "tool_calls": self.state.calls}
            choice |= {"finish_reason": "tool_calls", "message": message}
        self.state.end()
        self._reply({"id": "0", "created": 0, "model": asked["model"], "choices": [choice]})

    def _reply(self, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass
