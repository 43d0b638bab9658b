/** Opens a `WebSocket`, with a token or a ticket, to the first of several addresses that answers. */

import type { Addresses } from "./addresses.ts";

/** The socket is closed. The server may have carried out the message: send it again with an idempotency key. */
export class ConnectionLost extends Error {}

/** The server refuses this page or program, for its token or ticket or for the page's origin. */
export class NotLetIn extends Error {}

/**
 * A token, or a function that returns the current token: the client calls it for each socket. Or a ticket of
 * `POST /websocket-ticket`, valid for one socket within ten seconds.
 */
export type Credential = { token: string | (() => string | Promise<string>) } | { ticket: string };

/** The credential for one socket. */
export type Shown = { token: string } | { ticket: string };

async function shownNow(credential?: Credential): Promise<Shown | undefined> {
  if (!credential || "ticket" in credential) return credential;
  return { token: typeof credential.token === "function" ? await credential.token() : credential.token };
}

const OPEN_MS_MAX = 10_000;
const PATIENCE_MS = 250;

/** Return the subprotocols that carry a credential: a page cannot set headers of a WebSocket. */
export function protocolsOf(credential: Shown): string[] {
  if ("ticket" in credential) return ["moorage", `moorage.ticket.${credential.ticket}`];
  const bytes = String.fromCharCode(...new TextEncoder().encode(credential.token));
  const shown = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["moorage", `moorage.bearer.${shown}`];
}

/** Return why a WebSocket did not open. The WebSocket hides the status, so ask for it by HTTP at the same address. */
async function whyClosed(url: string, credential?: Shown): Promise<Error> {
  const address = url.replace(/^ws/, "http");
  const signal = AbortSignal.timeout(OPEN_MS_MAX);
  const status = await fetch(address, { signal }).then((answer) => answer.status, () => 0);
  if (status === 401 && credential) {
    return new NotLetIn(`the server at ${url} refuses this ${Object.keys(credential)[0]}`);
  }
  const give = "give connect() { token } or { ticket }";
  if (status === 401) return new NotLetIn(`the server at ${url} needs a token: ${give}`);
  if (status) return new NotLetIn(`the server at ${url} opens no WebSocket here: HTTP ${status} without it`);
  // A page may not read another origin's answer, but learns whether anything answers.
  const there = await fetch(address, { mode: "no-cors", signal }).then(() => true, () => false);
  if (!there) return new ConnectionLost(`nothing answers at ${url}`);
  const origin = `${globalThis.location?.origin ?? "this origin"} in the setting allowed_origins`;
  if (!credential) return new NotLetIn(`${url} does not let this page in: ${give}, or name ${origin}`);
  const right = "token" in credential ? "the token right" : "the ticket unused and not older than ten seconds";
  return new NotLetIn(`${url} does not let this page in: is ${right}, and is ${origin}?`);
}

type Attempt = { readonly open: Promise<Opened>; giveUp(): void };
type Opened = { readonly socket: WebSocket; readonly url: string };

function begin(url: string, credential?: Shown): Attempt {
  const socket = credential ? new WebSocket(url, protocolsOf(credential)) : new WebSocket(url);
  const opening = new AbortController();
  const once = { once: true, signal: opening.signal };
  const open = new Promise<Opened>((resolve, reject) => {
    const late = () => (giveUp(), reject(new ConnectionLost(`no answer at ${url} within ${OPEN_MS_MAX / 1_000} s`)));
    const timer = setTimeout(late, OPEN_MS_MAX);
    opening.signal.addEventListener("abort", () => clearTimeout(timer));
    socket.addEventListener("open", () => (opening.abort(), resolve({ socket, url })), once);
    socket.addEventListener("error", () => (opening.abort(), void whyClosed(url, credential).then(reject)), once);
  });
  const giveUp = () => (opening.abort(), socket.close());
  return { open, giveUp };
}

/**
 * Opens sockets, starting with the most promising address. It tries the next one when an attempt fails, and also in
 * parallel when an attempt takes long. Slow attempts continue, so that it reaches a slow leader behind a quick standby.
 */
export class Dialer {
  private readonly attempts = new Map<string, Attempt>();
  private readonly addresses: Addresses;
  private readonly credential: Credential | undefined;

  constructor(addresses: Addresses, credential?: Credential) {
    this.addresses = addresses;
    this.credential = credential;
  }

  /** Whether the next socket may send another token than the last one. */
  get renews(): boolean {
    return !!this.credential && "token" in this.credential && typeof this.credential.token === "function";
  }

  async dial(): Promise<WebSocket> {
    const shown = await shownNow(this.credential);
    const urls = this.addresses.order();
    const problems: Error[] = [];
    const tried: Promise<Opened | undefined>[] = [];
    for (const url of urls) {
      const attempt = this.attempts.get(url) ?? begin(url, shown);
      this.attempts.set(url, attempt);
      const outcome = attempt.open.catch((error: Error) => {
        this.attempts.delete(url);
        problems.push(error);
        this.addresses.failed(url, error.message);
        return undefined;
      });
      tried.push(outcome);
      const first = Promise.any(tried.map(async (each) => (await each) ?? Promise.reject())).catch(() => undefined);
      let timer: ReturnType<typeof setTimeout> | undefined;
      const patience = new Promise<undefined>((resolve) => (timer = setTimeout(resolve, PATIENCE_MS, undefined)));
      const found = await (tried.length === urls.length ? first : Promise.race([first, outcome, patience]));
      clearTimeout(timer);
      if (found === undefined) continue;
      this.attempts.delete(found.url);
      if (found.socket.readyState !== WebSocket.OPEN) return this.dial(); // It was closed meanwhile.
      this.addresses.opened(found.url);
      return found.socket;
    }
    const [problem] = problems;
    const alike = urls.length === 1 || problems.every((each) => each instanceof NotLetIn);
    throw alike && problem ? problem : this.addresses.failure();
  }

  /** Cancel the open attempts: a connection works, or the caller no longer needs one. */
  settle(): void {
    for (const each of this.attempts.values()) each.giveUp();
    this.attempts.clear();
  }
}
