/**
 * A thin client over the built-in `WebSocket`: one promise per message, and a listener for events. If a socket is lost,
 * the client opens another one. Of several servers, it uses the leader. It repeats messages only if that is safe.
 */

import { Addresses, pause, type Redirection } from "./addresses.ts";
import type { FailureMessage, NewsMessage, Operations } from "./messages.ts";
import { ConnectionLost, Dialer, type Credential } from "./sockets.ts";

export { ConnectionLost, NotLetIn, protocolsOf, type Credential, type Shown } from "./sockets.ts";

/** The server refused a message. `code` is for programs, `message` for people. */
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

export type Options = {
  /** How long to look for a server after a socket was lost; 0: open calls reject at once. */
  reconnectSeconds?: number;
};

const RECONNECT_SECONDS = 30;
/** With several servers: after this silence, the client sends a server that owes a reply a message to test it. */
const QUIET_MS = 1_000;
/** Any reply to the test counts; after this silence the server counts as lost. */
const LIFE_MS_MAX = 2_000;
/** Close codes after which the same message would fail again on another socket: too large, not allowed. */
const FINAL_CLOSES = new Set([1007, 1009, 4401]);
/** The token has expired: final, unless the client can get another one. */
const NOT_LET_IN = 4401;
/** Operations that are not sent again if the server may have carried them out. */
const NOT_REPEATED = new Set(["manage", "exec", "reserve"]);

type Names = keyof Operations;
type Said<N extends Names> = Omit<Operations[N]["message"], "op" | "adhoc" | "id">;
type Pending = {
  readonly id: number;
  readonly text: string;
  readonly repeats: boolean;
  readonly resolve: (reply: never) => void;
  readonly reject: (error: Error) => void;
  socket?: WebSocket;
  sentAt: number;
  givesUpAt: number;
  wasLed: boolean;
};

export class MoorageClient {
  /** Gets the events of the topics of `watch`; after `reconnected` some may be missing, after `lost` no more come. */
  onNews: (news: NewsMessage) => void = () => {};
  private readonly waiting = new Map<number, Pending>();
  private readonly topics = new Set<string>();
  private readonly addresses: Addresses;
  private readonly dialer: Dialer;
  private readonly reconnectMs: number;
  private next = 1;
  private socket: WebSocket | undefined;
  private opening: Promise<WebSocket> | undefined;
  private heardAt = 0;
  private guard: ReturnType<typeof setInterval> | undefined;
  private closed = false;

  private constructor(urls: string | readonly string[], credential?: Credential, options: Options = {}) {
    this.addresses = new Addresses(urls);
    this.dialer = new Dialer(this.addresses, credential);
    const once = !!credential && "ticket" in credential; // A ticket opens only one socket.
    this.reconnectMs = once ? 0 : (options.reconnectSeconds ?? RECONNECT_SECONDS) * 1_000;
  }

  /**
   * Open a socket, for example to ws://127.0.0.1:8765, with the token or ticket of this page or program. Give several
   * servers of one fleet as a list, or as one string with commas.
   */
  static async connect(
    urls: string | readonly string[],
    credential?: Credential,
    options?: Options,
  ): Promise<MoorageClient> {
    const client = new MoorageClient(urls, credential, options);
    client.take(await client.dialer.dial());
    return client;
  }

  /** The address of the current socket, or of the last one. */
  get url(): string {
    return this.addresses.at;
  }

  /**
   * Send one message and return its reply. Rejects with `Refused` if the server refuses it. A request with a lease gets
   * an idempotency key, so the client may send it again after a lost socket, and the server grants it only once.
   */
  ask<N extends Names>(operation: N, message: Said<N>): Promise<Operations[N]["reply"]> {
    const kind = operation === "allocate" ? { adhoc: true } : { op: operation };
    const id = this.next++;
    const text = JSON.stringify({ ...withKey(message), ...kind, id });
    const reply = new Promise<Operations[N]["reply"]>((resolve, reject) => {
      const repeats = this.reconnectMs > 0 && !NOT_REPEATED.has(operation);
      void this.send({ id, text, repeats, resolve, reject, sentAt: 0, givesUpAt: Infinity, wasLed: false });
    });
    if (operation !== "watch") return reply;
    return reply.then((answer) => {
      for (const topic of (message as Said<"watch">).topics ?? []) this.topics.add(topic);
      return answer;
    });
  }

  /** Close the socket; leases last until their TTL. */
  close(): void {
    this.closed = true;
    clearInterval(this.guard);
    this.dialer.settle();
    this.socket?.close();
    this.rejectAll(new ConnectionLost("the client closed the socket"));
  }

  private async send(pending: Pending): Promise<void> {
    this.waiting.set(pending.id, pending);
    try {
      const socket = await this.connected();
      if (!this.waiting.has(pending.id)) return; // The client was closed meanwhile.
      pending.socket = socket;
      pending.sentAt = Date.now();
      socket.send(pending.text);
    } catch (error) {
      this.waiting.delete(pending.id);
      pending.reject(error as Error);
    }
  }

  /** Return the open socket, or open another one. */
  private connected(): Promise<WebSocket> {
    if (this.socket?.readyState === WebSocket.OPEN) return Promise.resolve(this.socket);
    if (this.closed || this.reconnectMs === 0) return Promise.reject(new ConnectionLost("the socket is closed"));
    this.opening ??= this.reopened().finally(() => (this.opening = undefined));
    return this.opening;
  }

  private async reopened(): Promise<WebSocket> {
    const until = Date.now() + this.reconnectMs;
    for (let attempt = 0; ; attempt++) {
      try {
        const socket = await this.dialer.dial();
        if (this.closed) {
          socket.close();
          throw new ConnectionLost("the client is closed");
        }
        this.take(socket);
        return socket;
      } catch (error) {
        if (this.closed || !(error instanceof ConnectionLost) || Date.now() >= until) throw error;
      }
      await pause(attempt, this.addresses.several);
    }
  }

  /** Use an open socket from now on. */
  private take(socket: WebSocket): void {
    this.socket = socket;
    this.heardAt = Date.now();
    socket.addEventListener("message", (event) => this.heard(socket, String(event.data)));
    socket.addEventListener("close", (event) => this.lost(socket, event.code, event.reason));
    if (this.topics.size) this.watchAgain(socket);
    if (this.addresses.several) this.guard ??= setInterval(() => this.lookForLife(), QUIET_MS);
  }

  private watchAgain(socket: WebSocket): void {
    const id = this.next++;
    const tell = () => this.onNews({ event: "reconnected", data: { url: this.url } });
    const again = () => void pause(2, true).then(() => this.watchOn()); // A standby sends no events.
    const rest = { repeats: false, sentAt: Date.now(), givesUpAt: 0, wasLed: true, socket };
    const text = JSON.stringify({ op: "watch", topics: [...this.topics], id });
    this.waiting.set(id, { id, text, resolve: tell, reject: again, ...rest });
    socket.send(text);
  }

  private heard(socket: WebSocket, text: string): void {
    const came = JSON.parse(text);
    this.heardAt = Date.now();
    if ("event" in came) {
      this.onNews(came);
      return;
    }
    const pending = this.waiting.get(came.id);
    if (pending === undefined || pending.socket !== socket) return; // The reply to a test, or from an abandoned socket.
    this.waiting.delete(came.id);
    if (came.as_of) {
      // A standby's answer may be outdated: ask the leader.
      const error = { code: "not_leader", reason: "is a standby", leader: came.leader || null };
      void this.follow(socket, pending, { ...came, success: false, message: error.reason, error } as FailureMessage);
    } else if (came.success) {
      this.dialer.settle();
      pending.resolve(came as never);
    } else if (this.isNotWriter(pending, came)) void this.follow(socket, pending, came as FailureMessage);
    else pending.reject(new Refused(came));
    if (socket !== this.socket && ![...this.waiting.values()].some((each) => each.socket === socket)) socket.close();
  }

  private isNotWriter(pending: Pending, { error }: FailureMessage): boolean {
    const stops = error.code === "shutting_down" && pending.repeats && this.addresses.several;
    return stops || error.code === "not_leader";
  }

  /** Send a message that a standby did not carry out to the leader that the standby names, or to the next address. */
  private async follow(socket: WebSocket, pending: Pending, refusal: FailureMessage): Promise<void> {
    let target: Redirection = "elsewhere";
    if (socket === this.socket) {
      target = this.addresses.redirected(refusal.error as unknown as Record<string, unknown>);
      this.socket = undefined;
    }
    pending.socket = undefined;
    if (pending.givesUpAt === Infinity) pending.givesUpAt = Date.now() + this.reconnectMs;
    if (this.reconnectMs === 0 || Date.now() >= pending.givesUpAt) {
      pending.reject(this.addresses.failure());
      return;
    }
    await this.again(pending, target === "elsewhere" || refusal.error.code === "shutting_down");
  }

  /** Send a message again: at once if this is its first redirection to another server, otherwise after a pause. */
  private async again(pending: Pending, elsewhere: boolean): Promise<void> {
    if (!elsewhere || pending.wasLed) await pause(2, true);
    pending.wasLed = true;
    if (this.closed) pending.reject(new ConnectionLost("the client is closed"));
    else await this.send(pending);
  }

  private lost(socket: WebSocket, code: number, reason: string): void {
    const wasCurrent = socket === this.socket;
    if (wasCurrent) {
      this.addresses.lost(reason || `closed with ${code}`);
      this.socket = undefined;
    }
    const problem = new ConnectionLost("the socket closed");
    const isFinal = FINAL_CLOSES.has(code) && !(code === NOT_LET_IN && this.dialer.renews);
    for (const pending of [...this.waiting.values()].filter((each) => each.socket === socket)) {
      this.waiting.delete(pending.id);
      const now = Date.now();
      if (pending.givesUpAt === Infinity || now - pending.sentAt > this.reconnectMs) pending.givesUpAt = now + this.reconnectMs;
      if (this.closed || !pending.repeats || isFinal || now >= pending.givesUpAt) pending.reject(problem);
      else void this.again(pending, true);
    }
    if (wasCurrent && this.topics.size) this.watchOn();
  }

  /** Open a socket for the events. */
  private watchOn(): void {
    const lost = (error: Error) => this.closed || this.onNews({ event: "lost", data: { reason: error.message } });
    if (!this.closed) this.connected().catch(lost);
  }

  private lookForLife(): void {
    const socket = this.socket;
    const silent = Date.now() - this.heardAt;
    if (silent < QUIET_MS || socket?.readyState !== WebSocket.OPEN) return;
    const owed = [...this.waiting.values()].filter((each) => each.socket === socket);
    const since = Math.max(this.heardAt, Math.min(...owed.map((each) => each.sentAt)));
    if (!this.topics.size && (!owed.length || Date.now() - since < QUIET_MS)) return;
    if (silent < QUIET_MS + LIFE_MS_MAX || Date.now() - since < LIFE_MS_MAX) {
      socket.send(JSON.stringify({ op: "watch", topics: [], id: this.next++ }));
      return;
    }
    this.lost(socket, 0, "no sign of life");
    socket.close();
  }

  private rejectAll(error: Error): void {
    for (const each of this.waiting.values()) each.reject(error);
    this.waiting.clear();
  }
}

/** Return a message; a request with a lease gets an idempotency key if it has none. */
function withKey<M extends object>(message: M): M {
  const lease = "lease" in message ? message.lease : undefined;
  if (typeof lease !== "object" || lease === null || ("idempotency_key" in lease && lease.idempotency_key)) return message;
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // `randomUUID` exists only in https pages.
  const key = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { ...message, lease: { ...lease, idempotency_key: key } };
}
