"""A stand-in for the Hub: enough of its HTTP interface for the real client to push and pull a model repository.

python -m tests.doubles.hub FOLDER COMMAND ...    runs a command whose Hub is this one

Files live in a folder per repository. A client reads its environment when it is imported: a process of its own gets
`environment`, and this one is connected by `connect`.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_stand_in"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serve on a free loopback port while the context lasts; `requests` records what was asked.

    Args:
        root: a folder per repository lies in it. large_bytes: files above are uploaded as the Hub's large files.
        refuse_after: so many large files are taken, and no more, as if the connection were lost; None: all.
    """

    def __init__(self, root: Path, large_bytes: int = 100_000, refuse_after: int | None = None):
        self.root, self.large_bytes, self.refuse_after = root, large_bytes, refuse_after
        self.requests: list[str] = []
        self.private: dict[str, bool] = {}
        self.objects = root / ".lfs"
        self.objects.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()

    def environment(self, cache: Path, token: str | None = TOKEN) -> dict[str, str]:
        """What a client process needs to talk to this server and to nothing else."""
        variables = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(cache),
            "HF_TOKEN_PATH": str(cache / "no-token"),
            "no_proxy": "127.0.0.1",
        }
        return variables | ({"HF_TOKEN": token} if token else {})

    def connect(self, monkeypatch, cache: Path, token: str | None = TOKEN) -> None:
        """Let the client in this process talk to this server and to nothing else, for one test."""
        settings = {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_TOKEN_PATH": str(cache / "no-token"),
        }
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    def log_message(self, *args):
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, code: int, payload=None, headers: dict | None = None, body: bytes | None = None):
        body = json.dumps(payload).encode() if body is None else body
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, code: int, error: str, message: str):
        self._body()
        self._send(code, {"error": message}, {"X-Error-Code": error, "X-Error-Message": message})

    def _record(self) -> str:
        path = self.path.split("?")[0]
        self.server_state.requests.append(f"{self.command} {path}")
        return path

    def do_POST(self):
        path = self._record()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, "Unauthorized", "Invalid username or password.")
        hub = self.server_state
        if path == "/api/repos/create":
            request = json.loads(self._body())
            name = "/".join(part for part in (request.get("organization"), request["name"]) if part)
            (hub.root / name).mkdir(parents=True, exist_ok=True)
            if name in hub.private:  # creating again changes nothing, as on the Hub
                return self._send(409, {"url": f"{hub.endpoint}/{name}", "error": "You already created this"},
                                  {"X-Error-Message": "You already created this repo"})  # fmt: skip
            hub.private[name] = bool(request.get("private") or request.get("visibility") == "private")
            return self._send(200, {"url": f"{hub.endpoint}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":
            self._body()
            return self._send(200, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            files = json.loads(self._body())["files"]
            mode = {True: "lfs", False: "regular"}
            answer = [
                {
                    "path": f["path"],
                    "uploadMode": mode[f["size"] > hub.large_bytes],
                    "shouldIgnore": False,
                }
                for f in files
            ]
            return self._send(200, {"files": answer})
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = []
            for o in json.loads(self._body())["objects"]:
                entry = {"oid": o["oid"], "size": o["size"]}
                if not (hub.objects / o["oid"]).exists():
                    entry["actions"] = {"upload": {"href": f"{hub.endpoint}/lfs/{o['oid']}"}}
                objects.append(entry)
            return self._send(200, {"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            repository = hub.root / match[1]
            for line in self._body().splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    self._store(repository / value["path"], base64.b64decode(value["content"]))
                elif operation["key"] == "deletedFile":
                    (repository / value["path"]).unlink()
                elif operation["key"] == "lfsFile":
                    target = repository / value["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.unlink(missing_ok=True)
                    target.hardlink_to(hub.objects / value["oid"])
            url = f"{hub.endpoint}/{match[1]}/commit/{COMMIT}"
            return self._send(200, {"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        return self._fail(404, "EntryNotFound", path)

    @staticmethod
    def _store(path: Path, content: bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def do_PUT(self):
        path = self._record()
        hub = self.server_state
        if hub.refuse_after is not None:
            hub.refuse_after -= 1
            if hub.refuse_after < 0:
                return self._fail(403, "Forbidden", "No more today.")
        oid, digest = path.split("/")[-1], hashlib.sha256()
        target = hub.objects / oid
        remaining = int(self.headers["Content-Length"])
        with open(target.with_suffix(".part"), "wb") as file:
            while remaining:
                block = self.rfile.read(min(remaining, 1 << 20))
                digest.update(block)
                file.write(block)
                remaining -= len(block)
        if digest.hexdigest() != oid:
            return self._send(400, {"error": "wrong hash"})
        target.with_suffix(".part").rename(target)
        return self._send(200, {})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self._record()
        hub = self.server_state
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            repository = hub.root / match[1]
            if not repository.is_dir():
                return self._fail(404, "RepoNotFound", "Repository not found")
            if match[2] not in (None, "main", COMMIT):
                return self._fail(404, "RevisionNotFound", "Invalid rev id")
            names = sorted(str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file())
            siblings = [{"rfilename": name} for name in names]
            info = {
                "id": match[1],
                "modelId": match[1],
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
            }
            return self._send(200, info | {"private": hub.private.get(match[1], False)})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            repository = hub.root / match[1]
            return self._send(200, [
                {"type": "file", "path": str(p.relative_to(repository)), "size": p.stat().st_size, "oid": "0" * 40}
                for p in sorted(repository.rglob("*")) if p.is_file()
            ])  # fmt: skip
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            file = hub.root / match[1] / match[3]
            if not (hub.root / match[1]).is_dir():
                return self._fail(404, "RepoNotFound", "Repository not found")
            if not file.is_file():
                return self._fail(404, "EntryNotFound", "Entry not found")
            data = file.read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            if match_range := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(match_range[1]), min(int(match_range[2]), len(data) - 1)
                span = {"Content-Range": f"bytes {first}-{last}/{len(data)}", "ETag": f'"{etag}"'}
                return self._send(206, headers=span, body=data[first : last + 1])
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data))}
            return self._send(200, headers=headers, body=data)
        return self._fail(404, "EntryNotFound", path)


if __name__ == "__main__":
    folder, *command = sys.argv[1:]
    root = Path(folder).absolute()
    with HubServer(root) as server:
        sys.exit(subprocess.run(command, env=os.environ | server.environment(root / ".cache")).returncode)
