// Figures as people read them.

/** A duration in seconds: "12 ms", "1.53 s", "3 min 5 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.0005) return "0 ms";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** 1234567 as "1.23M"; small ones in full. */
export function amount(number) {
  if (number === null || number === undefined) return "–";
  const size = Math.abs(number);
  if (size >= 1e6) return `${(number / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(number / 1e3).toPrecision(3)}k`;
  return String(Math.round(number));
}

export function percent(share) {
  if (share === null) return "–";
  const points = share * 100;
  return `${points > 0 && points < 9.95 ? points.toFixed(1) : Math.round(points)}%`;
}

export function rate(perSecond) {
  if (perSecond === null) return "–";
  return perSecond >= 9.95 || perSecond === 0 ? String(Math.round(perSecond)) : perSecond.toFixed(1);
}

/** The time of day, in the reader's zone. */
export function clock(epochSeconds) {
  return new Date(epochSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function plural(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}
