/** A component that re-renders only when one of its properties has changed. */

import { Component } from "../../vendor/preact.js";

export function memo(renderProps) {
  return class extends Component {
    shouldComponentUpdate(next) {
      for (const name in next) if (next[name] !== this.props[name]) return true;
      return false;
    }
    render(props) {
      return renderProps(props);
    }
  };
}
