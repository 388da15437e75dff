//! Windows: what changed in a trainer's model between two steps, in a folder that any tool can
//! write. A window has one file of rows, and optionally the dense network and probe lines of the
//! same step. It counts only once its `window.json` exists, which is renamed into place last.
//! FORMAT.md draws the files. Reads rows one by one and never holds a table's rows in memory.

pub mod columns;
pub mod error;
pub mod folder;
pub mod head;
pub mod reader;
pub mod writer;

pub use error::WindowError;
pub use head::{BacklogState, HeldGeneration, KafkaOffsets, WindowHead};
pub use reader::{Window, WindowTable};
