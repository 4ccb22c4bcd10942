//! The store from outside: what is acknowledged stays, whatever happens to process, disk and files.

#![allow(clippy::unwrap_used)]

mod barriers;
mod basics;
mod damage;
mod disk;
mod full_disk;
mod hang;
mod kill;
mod power;
mod support;
