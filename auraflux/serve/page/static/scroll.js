// Keeps the end of a growing answer in sight until the reader scrolls up, and again once they come back down.

const NEAR = 40;

export class Follow {
  constructor(box, jump) {
    this.box = box;
    this.jump = jump;
    this.following = true;
    this.top = 0;
    box.addEventListener("scroll", () => this.scrolled(), { passive: true });
    jump.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.grown()).observe(box);
  }

  // only going up means leaving: content that shrinks or grows also moves the end
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const left = scrollHeight - scrollTop - clientHeight;
    if (left < NEAR) this.following = true;
    else if (scrollTop < this.top) this.following = false;
    this.top = scrollTop;
    this.jump.hidden = left < NEAR * 3;
  }

  // Call after the content grew.
  grown() {
    if (this.following) this.box.scrollTop = this.box.scrollHeight;
    this.scrolled();
  }

  toEnd() {
    this.following = true;
    this.box.scrollTop = this.box.scrollHeight;
    this.scrolled();
  }
}
