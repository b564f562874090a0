// Browsers start no worker from a file of the disk. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.loaded = new Promise((resolve) => (this.frame.onload = resolve)).then(() => this.run(url));
      document.body.append(this.frame);
    }
    run(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => queueMicrotask(() => this.receive(data));
      const script = inside.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      const loaded = new Promise((resolve) => (script.onload = resolve));
      inside.document.body.append(script);
      return loaded;
    }
    receive(data) {
      const message = new MessageEvent("message", { data: structuredClone(data) });
      this.onmessage?.(message);
      this.dispatchEvent(message);
    }
    postMessage(data) {
      this.loaded.then(() => {
        const inside = this.frame.contentWindow;
        inside?.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) }));
      });
    }
    terminate() {
      this.frame.remove();
    }
  };
}
