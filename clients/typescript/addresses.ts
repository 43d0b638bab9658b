/** Chooses the next address to try among the servers of one fleet, of which one leads. */

import { ConnectionLost } from "./sockets.ts";

/** The consequence of a standby's answer: ask another address at once, or after a pause. */
export type Redirection = "elsewhere" | "later";

const PAUSES_MS = [50, 100, 200, 400, 800, 1_600, 3_000];
const PAUSES_MS_OF_SEVERAL = [
  ...Array<number>(6).fill(50),
  ...Array<number>(4).fill(100),
  ...Array<number>(8).fill(200),
  ...[400, 800, 1_600, 3_000],
];

/** Wait before another attempt, longer each time. */
export function pause(attempt: number, several: boolean): Promise<void> {
  const known = several ? PAUSES_MS_OF_SEVERAL : PAUSES_MS;
  const most = known[Math.min(attempt, known.length - 1)] ?? 0;
  return new Promise((resolve) => setTimeout(resolve, most * (0.5 + Math.random() / 2)));
}

export class Addresses {
  /** The address of the current socket, or of the last one. */
  at: string;
  private readonly named: readonly string[];
  private first = 0;
  private leader: string | undefined;
  private readonly said = new Map<string, string>();

  constructor(urls: string | readonly string[]) {
    const given = typeof urls === "string" ? urls.split(",") : urls;
    this.named = [...new Set(given.map((each) => each.trim()))];
    if (this.named.includes("") || this.named.length === 0) throw new TypeError("expected addresses, found a blank one");
    this.at = this.named[0] ?? "";
  }

  get several(): boolean {
    return this.named.length > 1;
  }

  /** The addresses to try, the most promising first. */
  order(): string[] {
    const turned = [...this.named.slice(this.first), ...this.named.slice(0, this.first)];
    return this.leader === undefined ? turned : [...new Set([this.leader, ...turned])];
  }

  opened(url: string): void {
    this.at = url;
    this.said.delete(url);
    if (this.named.includes(url)) this.first = this.named.indexOf(url);
  }

  failed(url: string, why: string): void {
    this.said.set(url, why);
  }

  /** Record that the connection was lost: the next address is tried first. */
  lost(why: string): void {
    this.failed(this.at, why);
    this.leader = undefined;
    this.passOver();
  }

  /**
   * Record that the current server is a standby. The client sends its token to the leader that the standby names. So it
   * follows only if the user named the standby's address, and both addresses have the same scheme.
   */
  redirected(details: Record<string, unknown>): Redirection {
    this.leader = undefined;
    this.passOver();
    const by = this.at;
    const found = typeof details.leader === "string" ? details.leader.replace(/\/$/, "") : "";
    const known = this.named.find((each) => each.replace(/\/$/, "") === found);
    const follows = known === undefined ? this.named.includes(by) && mayFollow(by, found) : known !== by;
    this.said.set(by, found ? `is a standby, and names ${found}${follows ? "" : ", which is not followed"}` : "is a standby");
    if (!follows) return "later";
    this.leader = known ?? found;
    return "elsewhere";
  }

  failure(): ConnectionLost {
    const each = [...this.said].map(([url, why]) => `${url}: ${why}`).join("; ");
    return new ConnectionLost(`none of ${this.said.size} addresses serves: ${each}`);
  }

  private passOver(): void {
    if (this.at === this.named[this.first]) this.first = (this.first + 1) % this.named.length;
  }
}

const LOOPBACK = /^(localhost|.*\.localhost|127(\.\d+){3}|\[::1\]|0\.0\.0\.0|\[::\])$/;

function mayFollow(by: string, leader: string): boolean {
  try {
    const [ours, theirs] = [new URL(by), new URL(leader)];
    if (ours.protocol !== theirs.protocol || theirs.username || theirs.password) return false;
    return LOOPBACK.test(ours.hostname) || !LOOPBACK.test(theirs.hostname);
  } catch {
    return false;
  }
}
