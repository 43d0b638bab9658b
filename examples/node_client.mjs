// Lease a GPU from Node, use it, release it: node node_client.mjs [URL]
// Node 22 or newer; on Node 20 add --experimental-websocket.

const token = process.env.MOORAGE_TOKEN; // Needed if the server has tokens.
const socket = new WebSocket(
  process.argv[2] ?? process.env.MOORAGE_URL ?? "ws://127.0.0.1:8765",
  token ? { headers: { Authorization: `Bearer ${token}` } } : {},
);
const waiting = new Map();

socket.onmessage = ({ data }) => {
  const reply = JSON.parse(data);
  waiting.get(reply.id)?.(reply);
  waiting.delete(reply.id);
};

function ask(message) {
  const id = crypto.randomUUID();
  return new Promise((resolve) => {
    waiting.set(id, resolve);
    socket.send(JSON.stringify({ ...message, id }));
  });
}

await new Promise((resolve) => {
  socket.onopen = resolve;
  socket.onerror = async () => {
    // A WebSocket hides the status; HTTP at the same address has it.
    const status = await fetch(socket.url.replace("ws", "http")).then((http) => http.status, () => 0);
    const way = status === 401 ? "needs a token: set MOORAGE_TOKEN" : "does not answer: start moored serve --here";
    console.error(`no GPU: the server at ${socket.url} ${way}`);
    process.exit(1);
  };
});
const reply = await ask({
  adhoc: true,
  policy_rule_uri: "first_fit:1.0-stable",
  inputs: {},
  resources: { gpus: 1 },
  lease: { ttl_seconds: 60 },
});
if (reply.success) {
  const { id: lease, token, placement } = reply.lease;
  console.log("yours:", placement[0].cluster_id, placement[0].node_id, "GPU", ...placement[0].gpus);
  await ask({ op: "release", lease, token });
} else {
  console.error(`no GPU: ${reply.error.reason}`);
  process.exitCode = 1;
}
socket.close();
