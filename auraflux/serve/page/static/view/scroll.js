// Follows the end of a growing answer until the user scrolls up, and again once they scroll back to the end.

const NEAR_PX = 40;

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

  // only scrolling up stops following: content that grows or shrinks also moves the end
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const left = scrollHeight - scrollTop - clientHeight;
    if (left < NEAR_PX) this.following = true;
    else if (scrollTop < this.top) this.following = false;
    this.top = scrollTop;
    this.jump.hidden = left < NEAR_PX * 3;
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
