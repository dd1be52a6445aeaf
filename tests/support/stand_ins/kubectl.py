"""The commands of kubectl that windfall uses. It asks the server of a kubeconfig that is written as JSON.

kubectl get deployment/NAME --output=json          kubectl scale deployment/NAME --replicas=N
kubectl get pods --selector=KEY=VALUE,... --output=json
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any


def main(verb: str, what: str, *rest: str) -> None:
    given = dict(option.removeprefix("--").split("=", 1) for option in rest)
    assert given.keys() <= {"output", "replicas", "selector", "namespace", "request-timeout", "kubeconfig"}, given
    space = f"/namespaces/{given['namespace']}"
    with open(given["kubeconfig"]) as file:
        server = json.load(file)["clusters"][0]["cluster"]["server"]
    if verb == "scale":
        body = {"spec": {"replicas": int(given["replicas"])}}
        path = f"/apis/apps/v1{space}/deployments/{what.removeprefix('deployment/')}"
        ask(server + path)
        ask(f"{server}{path}/scale", body)
    elif what == "pods":
        query = urllib.parse.urlencode({"labelSelector": given["selector"]})
        print(json.dumps(ask(f"{server}/api/v1{space}/pods?{query}")))
    else:
        print(json.dumps(ask(f"{server}/apis/apps/v1{space}/deployments/{what.removeprefix('deployment/')}")))


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/merge-patch+json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method="PATCH" if body else "GET")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        status = json.load(e)
        if e.code == 401:
            sys.exit("error: You must be logged in to the server (Unauthorized)")
        sys.exit(f"Error from server ({status['reason']}): {status['message']}")
    except urllib.error.URLError as e:
        sys.exit(f"The connection to the server {url} was refused: {e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
