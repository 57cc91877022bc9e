/** A component that renders anew only when one of its properties is another. */

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
