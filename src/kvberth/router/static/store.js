// What the router has said so far: its requests, of which it tells only the new ones again, and the last minutes'
// course. No DOM and no clock.

import { markStuck, request } from "./model.js";

const KEPT_RECENT = 500;
const KEPT_SAMPLES = 120;
const RATE_SECONDS = 5;

export class Store {
  constructor() {
    this.forget();
  }

  /** After a pause: what has happened meanwhile is asked for anew, and the course begins anew. */
  forget() {
    this.requests = null;
    this.samples = [];
    this.endedTotal = 0;
  }

  /** Takes an answer of `/kvberth/requests?after=endedTotal`. */
  take(said, now) {
    if (said.ended_total < this.endedTotal) this.forget(); // another router, which has told everything
    const before = this.requests?.recent ?? [];
    this.endedTotal = said.ended_total;
    const answered = said.answered.map(({ path, code, requests }) => ({ path, code, count: requests }));
    this.requests = {
      inFlight: said.in_flight.map(request),
      inFlightTotal: said.in_flight_total,
      recent: [...said.recent.map(request), ...before].slice(0, KEPT_RECENT),
      admitted: said.admitted,
      queued: said.queued,
      maxInFlight: said.max_in_flight,
      answered,
    };
    markStuck(this.requests.inFlight, this.requests.recent);
    const total = answered.reduce((sum, each) => sum + each.count, 0);
    this.samples.push({ at: now, total, inFlight: said.admitted, rate: this.#rate(total, now) });
    this.samples = this.samples.slice(-KEPT_SAMPLES);
  }

  /** Requests answered per second of late, null before that can be said. */
  get rate() {
    return this.samples.at(-1)?.rate ?? null;
  }

  #rate(total, now) {
    const since = this.samples.findLast((sample) => now - sample.at >= RATE_SECONDS) ?? this.samples[0];
    return since && now > since.at ? (total - since.total) / (now - since.at) : null;
  }
}
