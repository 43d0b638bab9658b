/** A thin client over the built-in `WebSocket`: one promise per message, news to a listener. */

import type { FailureMessage, NewsMessage, Operations } from "./messages.ts";

/** The server said no. `code` is for programs, `message` for people. */
export class Refused extends Error {
  readonly failure: FailureMessage;

  constructor(failure: FailureMessage) {
    super(failure.message);
    this.failure = failure;
  }

  get code(): FailureMessage["error"]["code"] {
    return this.failure.error.code;
  }
}

/** The socket is closed. What was asked may have been done: ask again with an idempotency key. */
export class ConnectionLost extends Error {}

/** A server answers, but lets this page or program not in: its token or ticket, or the page's origin. */
export class NotLetIn extends Error {}

/** A token, or a ticket of `POST /websocket-ticket`: good for one socket, within ten seconds. */
export type Credential = { token: string } | { ticket: string };

/** What `new WebSocket(url, protocols)` takes: a page sets no headers, but names subprotocols. */
export function protocolsOf(credential: Credential): string[] {
  if ("ticket" in credential) return ["moorage", `moorage.ticket.${credential.ticket}`];
  const bytes = String.fromCharCode(...new TextEncoder().encode(credential.token));
  const shown = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["moorage", `moorage.bearer.${shown}`];
}

/** Say why a WebSocket did not open: it hides the status, which HTTP at its address has, too. */
async function whyClosed(url: string, credential?: Credential): Promise<Error> {
  const address = url.replace(/^ws/, "http");
  const status = await fetch(address).then((answer) => answer.status, () => 0);
  if (status === 401 && credential) {
    return new NotLetIn(`the server at ${url} refuses this ${Object.keys(credential)[0]}`);
  }
  const give = "give connect() { token } or { ticket }";
  if (status === 401) return new NotLetIn(`the server at ${url} needs a token: ${give}`);
  if (status) return new NotLetIn(`the server at ${url} opens no WebSocket here: HTTP ${status} without it`);
  // A page may not read what other origins answer, but learns that something does.
  const there = await fetch(address, { mode: "no-cors" }).then(() => true, () => false);
  if (!there) return new ConnectionLost(`nothing answers at ${url}`);
  return new NotLetIn(`${url} lets this page not in: ${give}, or see the setting allowed_origins`);
}

type Names = keyof Operations;
type Said<N extends Names> = Omit<Operations[N]["message"], "op" | "adhoc" | "id">;
type Waiting = { resolve: (reply: never) => void; reject: (error: Error) => void };

export class MoorageClient {
  /** Is told the news of the topics that `watch` named. */
  onNews: (news: NewsMessage) => void = () => {};
  private readonly waiting = new Map<number, Waiting>();
  private next = 1;
  private readonly socket: WebSocket;

  private constructor(socket: WebSocket) {
    this.socket = socket;
    socket.addEventListener("message", (event) => this.heard(String(event.data)));
    socket.addEventListener("close", () => {
      for (const each of this.waiting.values()) each.reject(new ConnectionLost("the socket closed"));
      this.waiting.clear();
    });
  }

  /** Open a socket, for example to ws://127.0.0.1:8765, with what lets this page or program in. */
  static connect(url: string, credential?: Credential): Promise<MoorageClient> {
    const socket = credential ? new WebSocket(url, protocolsOf(credential)) : new WebSocket(url);
    const client = new MoorageClient(socket);
    return new Promise((resolve, reject) => {
      const opening = new AbortController();
      socket.addEventListener("open", () => (opening.abort(), resolve(client)), { once: true });
      const lost = () => void whyClosed(url, credential).then(reject);
      socket.addEventListener("error", lost, { once: true, signal: opening.signal });
    });
  }

  /** Say one message. Rejects with `Refused` where the server says no. */
  ask<N extends Names>(operation: N, message: Said<N>): Promise<Operations[N]["reply"]> {
    if (this.socket.readyState !== WebSocket.OPEN) {
      return Promise.reject(new ConnectionLost("the socket is closed"));
    }
    const id = this.next++;
    const kind = operation === "allocate" ? { adhoc: true } : { op: operation };
    return new Promise<Operations[N]["reply"]>((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.socket.send(JSON.stringify({ ...message, ...kind, id }));
    });
  }

  /** Close the socket; a lease stays until its time is up. */
  close(): void {
    this.socket.close();
  }

  private heard(text: string): void {
    const came = JSON.parse(text);
    if ("event" in came) {
      this.onNews(came);
      return;
    }
    const asked = this.waiting.get(came.id);
    this.waiting.delete(came.id);
    if (came.success) asked?.resolve(came as never);
    else asked?.reject(new Refused(came));
  }
}
